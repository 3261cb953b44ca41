// SPDX-License-Identifier: Apache-2.0
// The kind `auto`: what it takes, what it says of the rest, and what it
// refuses.
#include <pipeline_auto.h>
#include <torch_sm3/pipeline/simulator.h>
#include <torch_sm3/pipeline/verifier.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>

namespace torch_sm3::pipeline {
namespace {

TEST(PlannerAuto, IsNeverWorseThanANamedKindThatFits) {
  for (const auto& triple :
       {stage(1, 1, 1, 8), stage(1, 2, 1, 8), stage(3, 4, 2, 8)}) {
    for (const int64_t p : {1, 2, 3, 4}) {
      for (const int64_t m : {1, 3, 8, 16}) {
        for (const double limit : {0.0, 8.0, 24.0, 40.0}) {
          PlanOptions options = automatic(p, m, {triple});
          options.link_cost = 0.25;
          options.costs->stages[0].boundary_bytes = 0.5;
          if (limit > 0) {
            options.memory_limit = {limit + 4};
          }
          const Choice choice = search(options);
          const LinkModel links{Links::kRendezvous, options.max_pending};
          const Simulation found = simulate(choice.schedule, choice.costs);
          const auto held =
              simulate(choice.schedule, choice.costs, links).peak_bytes;
          EXPECT_TRUE(verify(choice.schedule).valid());
          EXPECT_EQ(found.makespan, chosen(choice).makespan);
          EXPECT_EQ(largest(held), chosen(choice).peak_bytes);
          EXPECT_TRUE(limit == 0 || largest(held) <= limit + 4);
          EXPECT_EQ(plan(options), choice.schedule);
          for (const std::string& kind : kinds()) {
            if (kind == "auto" || kind == "forward" ||
                (kind == "none" && p > 1) ||
                (kind == "dualpipe_v" && m < 2 * p)) {
              continue;
            }
            PlanOptions named{.kind = kind, .ranks = p, .microbatches = m};
            named.link_cost = options.link_cost;
            const Schedule other = plan(named);
            Costs costs = part(*options.costs, other.stages / other.ranks);
            costs.latency = {options.link_cost};
            const Simulation run = simulate(other, costs);
            const auto peaks = simulate(other, costs, links).peak_bytes;
            if (limit == 0 || largest(peaks) <= limit + 4) {
              EXPECT_LE(found.makespan, run.makespan * (1 + 1e-9))
                  << kind << " p=" << p << " m=" << m << " limit=" << limit;
            }
          }
        }
      }
    }
  }
}

TEST(PlannerAuto, FindsBetterThanAnyNamedKindForUnequalStages) {
  const Choice choice = search(automatic(
      4,
      12,
      {stage(1, 1, 1, 1),
       stage(2, 2, 1, 1),
       stage(1, 3, 2, 1),
       stage(1, 1, 1, 1),
       stage(1, 1, 2, 1),
       stage(2, 1, 1, 1),
       stage(1, 2, 1, 1),
       stage(3, 1, 1, 1)}));
  double named = 1e9;
  for (const Candidate& candidate : choice.alternatives) {
    if (candidate.refused.empty() && candidate.plan.rfind("list", 0) != 0) {
      named = std::min(named, candidate.makespan);
    }
  }
  EXPECT_LT(chosen(choice).makespan, named);
  EXPECT_EQ(choice.schedule.kind, "auto");
  EXPECT_EQ(Schedule::parse(choice.schedule.text()), choice.schedule);
}

TEST(PlannerAuto, UsesTheRoomBetweenTwoKinds) {
  // v_half needs 5, zbv 8.
  const Choice choice = search(automatic(8, 32, {stage(1, 1, 1, 1)}, {6}));
  double half = 0;
  for (const Candidate& candidate : choice.alternatives) {
    if (candidate.plan == "v_half") {
      half = candidate.makespan;
    }
  }
  EXPECT_GT(half, 0);
  EXPECT_GT(chosen(choice).peak_bytes, 5);
  EXPECT_LT(chosen(choice).makespan, half - 1);
}

// At other costs than those that a pattern is made for, its actions become
// ready in another order.
TEST(PlannerAuto, ReordersTheBestWhereThatIsFaster) {
  const auto reordered = [](const Candidate& candidate) {
    return candidate.plan.find(" reordered") != std::string::npos;
  };
  int faster = 0;
  for (const StageCosts& costs :
       {stage(3, 4, 2, 1), stage(1, 2, 1, 1), stage(1, 1.3, 0.7, 1)}) {
    for (const double limit : {2.4, 3.2, 4.0, 6.0}) {
      const Choice choice = search(automatic(4, 16, {costs}, {limit}));
      double best = std::numeric_limits<double>::infinity();
      for (const Candidate& candidate : choice.alternatives) {
        if (candidate.refused.empty() && !reordered(candidate)) {
          best = std::min(best, candidate.makespan);
        }
      }
      EXPECT_LE(chosen(choice).makespan, best);
      EXPECT_LE(chosen(choice).peak_bytes, limit);
      EXPECT_TRUE(verify(choice.schedule).valid());
      if (chosen(choice).makespan < best) {
        EXPECT_TRUE(reordered(chosen(choice))) << chosen(choice).plan;
        EXPECT_EQ(choice.schedule.kind, "auto");
        ++faster;
      }
    }
  }
  EXPECT_GT(faster, 0);
}

TEST(PlannerAuto, TiesGoToLessMemory) {
  // On one rank everything takes equally long.
  const Choice choice = search(automatic(1, 6, {stage(1, 1, 1, 1)}));
  EXPECT_EQ(chosen(choice).makespan, 18);
  EXPECT_EQ(chosen(choice).peak_bytes, 1);
  EXPECT_EQ(choice.schedule.kind, "none");
}

TEST(PlannerAuto, GivesTheSameAnswerTwice) {
  const PlanOptions options = automatic(3, 7, {stage(1, 1.5, 0.75, 1)}, {2.5});
  const Choice first = search(options);
  const Choice second = search(options);
  EXPECT_EQ(first.schedule, second.schedule);
  ASSERT_EQ(first.alternatives.size(), second.alternatives.size());
  std::set<std::string> names;
  for (size_t i = 0; i < first.alternatives.size(); ++i) {
    EXPECT_EQ(first.alternatives[i].plan, second.alternatives[i].plan);
    EXPECT_EQ(first.alternatives[i].makespan, second.alternatives[i].makespan);
    EXPECT_TRUE(names.insert(first.alternatives[i].plan).second)
        << first.alternatives[i].plan;
  }
}

TEST(PlannerAuto, SaysWhyOthersWereRefused) {
  const Choice choice = search(automatic(4, 6, {stage(1, 1, 1, 10)}, {35}));
  const auto why = [&](const std::string& plan) -> std::string {
    for (const Candidate& candidate : choice.alternatives) {
      if (candidate.plan == plan) {
        return candidate.refused;
      }
    }
    return "not tried";
  };
  EXPECT_EQ(why("gpipe"), "rank 0 needs 60 bytes, its limit is 35");
  EXPECT_EQ(why("1f1b warmup=1"), "rank 0 needs 40 bytes, its limit is 35");
  EXPECT_EQ(why("1f1b warmup=1 lowered"), "");
  EXPECT_EQ(why("v_half"), "");
  EXPECT_EQ(why("dualpipe_v"), "needs 8 microbatches");
  EXPECT_LE(chosen(choice).peak_bytes, 35);
}

TEST(PlannerAuto, KeepsALimitPerRank) {
  const std::vector<double> limits{30, 20, 25};
  const Choice choice = search(automatic(3, 9, {stage(1, 1, 1, 10)}, limits));
  const Simulation run = simulate(choice.schedule, choice.costs);
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_LE(run.peak_bytes[rank], limits[rank]);
  }
}

TEST(PlannerAuto, NamesTheSmallestLimitIfNothingFits) {
  for (const int64_t p : {1, 2, 4}) {
    StageCosts costs = stage(1, 2, 1, 10);
    costs.boundary_bytes = 3;
    costs.transient_bytes = 5;
    costs.static_bytes = 7;
    PlanOptions options = automatic(p, 6, {costs}, {1});
    std::string refused;
    try {
      search(options);
      FAIL();
    } catch (const ScheduleError& error) {
      refused = error.what();
    }
    const std::string start = "plan: expected a memory limit of at least ";
    ASSERT_EQ(refused.rfind(start, 0), 0u) << refused;
    EXPECT_NE(
        refused.find("but got 1 (argument 'memory_limit')"), std::string::npos);
    const double least = std::stod(refused.substr(start.size()));
    options.memory_limit = {least};
    EXPECT_EQ(chosen(search(options)).peak_bytes, least);
    options.memory_limit = {least - 0.5};
    EXPECT_THROW(search(options), ScheduleError);
  }
  EXPECT_THROW(
      plan(automatic(2, 6, {stage(1, 1, 1, 10)}, {100, 5})), ScheduleError);
}

} // namespace
} // namespace torch_sm3::pipeline
