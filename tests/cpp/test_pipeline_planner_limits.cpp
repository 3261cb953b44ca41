// SPDX-License-Identifier: Apache-2.0
// Memory limits and forced groups: plans that are looked at as a whole.
#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/search.h>
#include <torch_sm3/pipeline/verifier.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

namespace torch_sm3::pipeline {
namespace {

Costs bytes(double activation, double boundary = 0, double fixed = 0) {
  Costs costs;
  costs.stages[0].activation_bytes = activation;
  costs.stages[0].boundary_bytes = boundary;
  costs.stages[0].static_bytes = fixed;
  return costs;
}

PlanOptions limited(
    const std::string& kind,
    int64_t ranks,
    int64_t microbatches,
    Costs costs,
    std::vector<double> limits) {
  PlanOptions options{
      .kind = kind, .ranks = ranks, .microbatches = microbatches};
  options.costs = std::move(costs);
  options.memory_limit = std::move(limits);
  return options;
}

std::vector<double> peaks(
    const Schedule& schedule,
    const Costs& costs,
    int64_t max_pending = PlanOptions{}.max_pending) {
  VerifyOptions options;
  options.costs = costs;
  options.links.max_pending = max_pending;
  const Report report = verify(schedule, options);
  EXPECT_TRUE(report.valid()) << report.message;
  return report.peak_bytes;
}

// Microbatches in flight on each rank.
std::vector<double> flight(const Schedule& schedule) {
  return peaks(schedule, bytes(1));
}

std::vector<std::pair<int64_t, int64_t>> ranks_and_pending() {
  std::vector<std::pair<int64_t, int64_t>> all;
  for (int64_t p = 1; p <= 5; ++p) {
    for (int64_t pending = 1; pending <= 3; ++pending) {
      all.emplace_back(p, pending);
    }
  }
  return all;
}

std::string refusal(const PlanOptions& options) {
  try {
    plan(options);
  } catch (const ScheduleError& error) {
    return error.what();
  }
  return "none";
}

TEST(PlannerLimits, LowerTheWarmUpRankByRank) {
  const auto with = [](std::vector<double> limits) {
    return flight(plan(limited("1f1b", 4, 9, bytes(10), std::move(limits))));
  };
  EXPECT_EQ(with({40}), (std::vector<double>{4, 3, 2, 1}));
  EXPECT_EQ(with({39}), (std::vector<double>{3, 3, 2, 1}));
  EXPECT_EQ(with({20}), (std::vector<double>{2, 2, 2, 1}));
  EXPECT_EQ(with({10}), (std::vector<double>{1, 1, 1, 1}));
  // Rank 1 has less: what comes after it cannot warm up longer.
  EXPECT_EQ(with({40, 15, 40, 40}), (std::vector<double>{4, 1, 1, 1}));
  EXPECT_EQ(with({40, 25, 40, 40}), (std::vector<double>{4, 2, 2, 1}));
}

TEST(PlannerLimits, LowerTheWarmUpForLinksToo) {
  PlanOptions options = limited("1f1b", 3, 12, bytes(1), {5});
  options.link_cost = 3;
  EXPECT_EQ(flight(plan(options)), (std::vector<double>{5, 4, 1}));
  options.memory_limit = {std::numeric_limits<double>::infinity()};
  EXPECT_EQ(flight(plan(options)), (std::vector<double>{7, 4, 1}));
}

// The peak that counts messages, at most one microbatch below what would fit.
TEST(PlannerLimits, PlansFitAndAreTight) {
  const Costs costs = bytes(100, 7, 13);
  for (const auto& [p, pending] : ranks_and_pending()) {
    PlanOptions options = limited("1f1b", p, 8, costs, {1e9});
    options.warmup = 3;
    options.max_pending = pending;
    // An output and a gradient that arrive, and those that are under way.
    const double messages = (2 + 2 * static_cast<double>(pending)) * 7;
    const double most = peaks(plan(options), costs, pending)[0];
    for (int step = 0; most - 50 * step > 0; ++step) {
      const double limit = most - 50 * step;
      options.memory_limit = {limit};
      const std::string refused = refusal(options);
      if (refused != "none") {
        EXPECT_LT(limit, 13 + 100 + messages) << refused;
        continue;
      }
      const std::vector<double> found = peaks(plan(options), costs, pending);
      EXPECT_LE(*std::max_element(found.begin(), found.end()), limit);
      EXPECT_GT(found[0], limit - 100 - messages) << "p=" << p;
    }
  }
}

// What is within the limit with many sends under way is so with fewer; and the
// plan is no larger than one more would make it.
TEST(PlannerLimits, SendsUnderWayCountAgainstTheLimit) {
  const Costs costs = bytes(10, 4, 0);
  const auto least_of = [](const PlanOptions& options) {
    const std::string refused = refusal(options);
    const std::string start = "plan: expected a memory limit of at least ";
    EXPECT_EQ(refused.rfind(start, 0), 0u) << refused;
    return std::stod(refused.substr(start.size()));
  };
  for (const std::string& kind : kinds()) {
    if (kind == "none") {
      continue;
    }
    double before = 0;
    bool grows = false;
    for (const int64_t pending : {1, 2, 4}) {
      PlanOptions options = limited(kind, 3, 7, costs, {1});
      options.max_pending = pending;
      const double least = least_of(options);
      EXPECT_GE(least, before) << kind;
      grows = grows || (before > 0 && least > before);
      options.memory_limit = {least};
      const Schedule found = plan(options);
      const Costs of = kind == "auto" ? search(options).costs : costs;
      for (int64_t fewer = 1; fewer <= pending; ++fewer) {
        for (const double peak : peaks(found, of, fewer)) {
          EXPECT_LE(peak, least) << kind << " " << pending << " " << fewer;
        }
      }
      before = least;
    }
    EXPECT_TRUE(grows) << kind;
  }
}

TEST(PlannerLimits, RefusalNamesTheSmallestLimit) {
  for (const char* kind :
       {"gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "v_min"}) {
    for (const double fixed : {0.0, 3.0}) {
      PlanOptions options = limited(kind, 3, 7, bytes(10, 1, fixed), {1});
      const std::string refused = refusal(options);
      const std::string start = "plan: expected a memory limit of at least ";
      ASSERT_EQ(refused.rfind(start, 0), 0u) << refused;
      const double least = std::stod(refused.substr(start.size()));
      options.memory_limit = {least};
      EXPECT_EQ(refusal(options), "none") << kind << " " << least;
      options.memory_limit = {least - 1};
      EXPECT_NE(refusal(options), "none") << kind << " " << least;
    }
  }
  EXPECT_EQ(
      refusal(limited("gpipe", 2, 3, bytes(10), {30, 20})),
      "plan: expected a memory limit of at least 30 bytes on rank 1 for kind "
      "gpipe, but got 20 (argument 'memory_limit')");
}

TEST(PlannerLimits, WrongLimitsAreNamed) {
  const auto wrong = [](const PlanOptions& options) -> std::string {
    try {
      plan(options);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "none";
  };
  PlanOptions options = limited("1f1b", 3, 2, bytes(1), {1, 1});
  EXPECT_NE(
      wrong(options).find("expected 1 or 3 memory limits, but got 2"),
      std::string::npos);
  options.memory_limit = {-1};
  EXPECT_NE(wrong(options).find("but got -1"), std::string::npos);
  options.memory_limit = {std::numeric_limits<double>::quiet_NaN()};
  EXPECT_NE(
      wrong(options).find("(argument 'memory_limit')"), std::string::npos);
  options.memory_limit = {1};
  for (const auto& costs : {std::optional<Costs>(), std::optional(Costs{})}) {
    options.costs = costs;
    EXPECT_EQ(
        wrong(options),
        "plan: expected costs in bytes beside a memory limit, but got none "
        "(argument 'costs')");
  }
}

TEST(PlannerLimits, OneRankAloneStillEqualsItsRow) {
  const PlanOptions options = limited("1f1b", 4, 9, bytes(10), {20});
  const Schedule whole = plan(options);
  for (int64_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(plan_rank(options, rank), whole.rows[static_cast<size_t>(rank)]);
  }
}

TEST(PlannerGroups, AGroupThatCannotRunIsRefusedWithTheGrid) {
  PlanOptions options{
      .kind = "interleaved", .ranks = 4, .microbatches = 5, .chunks = 3};
  options.group_size = 4;
  const std::string refused = refusal(options);
  EXPECT_EQ(
      refused.rfind(
          "plan: expected a group size whose order can run, but got 4 "
          "(argument 'group_size'); ",
          0),
      0u)
      << refused;
  EXPECT_NE(refused.find("waits"), std::string::npos) << refused;
  EXPECT_NE(refused.find("rank 3"), std::string::npos) << refused;
  EXPECT_GT(std::count(refused.begin(), refused.end(), '\n'), 3) << refused;
  EXPECT_THROW(plan_rank(options, 0), ScheduleError);
}

TEST(PlannerGroups, AGroupThatLosesTimeIsNamedWithBothBubbles) {
  PlanOptions options{
      .kind = "interleaved", .ranks = 4, .microbatches = 5, .chunks = 2};
  EXPECT_EQ(advice(options), "");
  options.group_size = 5;
  EXPECT_EQ(advice(options), "");
  options.group_size = 4;
  EXPECT_EQ(
      advice(options),
      "plan: group_size 4 leaves a bubble of 9, group_size 5 one of 4.5");
  options.costs = Costs{};
  EXPECT_EQ(
      advice(options),
      "plan: group_size 4 leaves a bubble of 18, group_size 5 one of 9");
  EXPECT_EQ(advice({"gpipe", 2, 2}), "");
  // A limit that the forced group keeps and the automatic one does not.
  options.microbatches = 9;
  options.costs->stages[0].activation_bytes = 1;
  options.memory_limit = {11};
  EXPECT_EQ(refusal(options), "none");
  EXPECT_NE(advice(options), "");
  options.group_size = 0;
  EXPECT_NE(refusal(options), "none");
}

} // namespace
} // namespace torch_sm3::pipeline
