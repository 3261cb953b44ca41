// SPDX-License-Identifier: Apache-2.0
// Every kind that the planner knows: its rows, its rules and its refusals. The
// bubbles and peaks are tests/python/pipeline/test_planner_results.py's.
#include <torch_sm3/pipeline/planner.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

namespace torch_sm3::pipeline {
namespace {

std::string row(const Schedule& schedule, size_t rank) {
  std::string cells;
  for (const Action action : schedule.rows[rank]) {
    cells.append(cells.empty() ? "" : " ").append(text(action));
  }
  return cells;
}

// All plans of up to 5 ranks and 12 microbatches.
std::vector<PlanOptions> small_plans() {
  std::vector<PlanOptions> all;
  for (const std::string& kind : kinds()) {
    for (int64_t p = 1; p <= (kind == "none" ? 1 : 5); ++p) {
      for (int64_t m = kind == "dualpipe_v" ? 2 * p : 1; m <= 12; ++m) {
        all.push_back({.kind = kind, .ranks = p, .microbatches = m});
        if (kind == "forward" || kind == "interleaved" ||
            kind == "looped_bfs") {
          all.push_back(
              {.kind = kind, .ranks = p, .microbatches = m, .chunks = 3});
        }
      }
    }
  }
  return all;
}

std::string words(const PlanOptions& options) {
  return options.kind + " p=" + std::to_string(options.ranks) +
         " m=" + std::to_string(options.microbatches) +
         " v=" + std::to_string(options.chunks);
}

std::string refusal(const PlanOptions& options) {
  try {
    plan(options);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "none";
}

TEST(Planner, RowsOfOneChunk) {
  EXPECT_EQ(row(plan({"none", 1, 2}), 0), "0F0 0B0 0F1 0B1");
  EXPECT_EQ(row(plan({"gpipe", 2, 2}), 1), "1F0 1F1 1B0 1B1");
  const Schedule schedule = plan({"1f1b", 3, 4});
  EXPECT_EQ(row(schedule, 0), "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3");
  EXPECT_EQ(row(schedule, 1), "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3");
  EXPECT_EQ(row(schedule, 2), "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3");
}

TEST(Planner, RowsOfZeroBubble) {
  const Schedule h1 = plan({"zb_h1", 2, 3});
  EXPECT_EQ(row(h1, 0), "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2");
  EXPECT_EQ(row(h1, 1), "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2");
  const Schedule h2 = plan({"zb_h2", 2, 3});
  EXPECT_EQ(row(h2, 0), "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2");
  EXPECT_EQ(row(h2, 1), "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2");
}

TEST(Planner, RowsOfManyChunks) {
  EXPECT_EQ(row(plan({"forward", 2, 2, 2}), 1), "1F0 1F1 3F0 3F1");
  EXPECT_EQ(
      row(plan({"looped_bfs", 2, 2, 2}), 0), "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1");
  EXPECT_EQ(
      row(plan({"interleaved", 2, 4, 2}), 1),
      "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3");
}

TEST(Planner, RowsOfV) {
  const Schedule zbv = plan({"zbv", 1, 2});
  EXPECT_EQ(zbv.placement, v_placement(1, 2));
  EXPECT_EQ(row(zbv, 0), "0F0 1F0 1I0 0I0 1W0 0F1 0W0 1F1 1I1 0I1 1W1 0W1");
  const Schedule paired = plan({"dualpipe_v", 1, 2});
  EXPECT_EQ(row(paired, 0), "0F0 1F0 0F1 1B0 1F1 0B0 1B1 0I1 0W1");
  EXPECT_EQ(paired.rows[0][2].flags, kPaired);
  EXPECT_EQ(paired.rows[0][3].flags, 0);
  EXPECT_EQ(paired.rows[0][4].flags, kPaired);
}

TEST(Planner, GroupsOfInterleaved) {
  // Groups of 2 and of 3; automatic: 5 has no group of 2 without a rest of 1.
  const auto first_of_chunk_1 = [](const Schedule& schedule) {
    const auto& actions = schedule.rows[1];
    return std::find_if(
               actions.begin(),
               actions.end(),
               [](Action a) { return a.stage == 3; }) -
           actions.begin();
  };
  PlanOptions options{
      .kind = "interleaved", .ranks = 2, .microbatches = 5, .chunks = 2};
  EXPECT_EQ(first_of_chunk_1(plan(options)), 3);
  options.microbatches = 4;
  EXPECT_EQ(first_of_chunk_1(plan(options)), 2);
  options.group_size = 4;
  EXPECT_EQ(first_of_chunk_1(plan(options)), 4);
  options.group_size = 100;
  EXPECT_EQ(plan(options).rows, plan({"interleaved", 2, 4, 2, 4}).rows);
}

TEST(Planner, LinkCostAddsRoundsOfWarmUp) {
  const auto warmup = [](const PlanOptions& options, size_t rank) {
    const Schedule schedule = plan(options);
    const auto& actions = schedule.rows[rank];
    const auto backward =
        std::find_if(actions.begin(), actions.end(), [](Action a) {
          return a.op == Op::kBackward;
        });
    return backward - actions.begin() - 1;
  };
  PlanOptions options{.kind = "1f1b", .ranks = 4, .microbatches = 20};
  EXPECT_EQ(warmup(options, 0), 3);
  // Unit costs: F + B takes 3.
  options.link_cost = 1.5;
  EXPECT_EQ(warmup(options, 0), 6);
  EXPECT_EQ(warmup(options, 2), 2);
  EXPECT_EQ(warmup(options, 3), 0);
  options.link_cost = 1.51;
  EXPECT_EQ(warmup(options, 0), 9);
  options.costs.emplace();
  StageCosts& costs = options.costs->stages[0];
  costs.forward = 0.1;
  costs.input = 0.2;
  costs.weight = 0.3;
  // 2 * 0.3 / 0.6 is 1, though not in binary.
  options.link_cost = 0.3;
  EXPECT_EQ(warmup(options, 0), 6);
  options.link_cost = 0;
  options.costs->latency = {0.9};
  EXPECT_EQ(warmup(options, 1), 8);
  options.warmup = 2;
  EXPECT_EQ(warmup(options, 0), 6);
  options.warmup = 100;
  EXPECT_EQ(row(plan(options), 3), row(plan({"1f1b", 4, 20}), 3));
  EXPECT_EQ(row(plan(options), 0), row(plan({"gpipe", 4, 20}), 0));
}

TEST(Planner, EveryStageWorksInMicrobatchOrder) {
  for (const PlanOptions& options : small_plans()) {
    const Schedule schedule = plan(options);
    for (const auto& actions : schedule.rows) {
      std::map<std::pair<int, int>, uint32_t> next;
      for (const Action action : actions) {
        const auto inputs = gives_input_gradient(action.op);
        const int what = inputs ? 1 : action.op == Op::kForward ? 0 : 2;
        EXPECT_EQ((next[{what, action.stage}]++), action.microbatch)
            << words(options);
        if (action.op == Op::kBackward) {
          EXPECT_EQ((next[{2, action.stage}]++), action.microbatch)
              << words(options);
        }
      }
      for (const auto& [key, count] : next) {
        EXPECT_EQ(count, schedule.microbatches) << words(options);
      }
      const size_t parts = options.kind == "forward" ? 1 : 3;
      EXPECT_EQ(next.size(), parts * schedule.stages / schedule.ranks);
    }
  }
}

TEST(Planner, OneRankAloneEqualsItsRowOfTheWhole) {
  for (const PlanOptions& options : small_plans()) {
    const Schedule schedule = plan(options);
    for (uint32_t rank = 0; rank < schedule.ranks; ++rank) {
      EXPECT_EQ(plan_rank(options, rank), schedule.rows[rank])
          << words(options) << " rank " << rank;
    }
  }
  EXPECT_THROW(plan_rank({"gpipe", 2, 2}, 2), std::invalid_argument);
  EXPECT_THROW(plan_rank({"gpipe", 2, 2}, -1), std::invalid_argument);
}

TEST(Planner, EveryPlanCanRun) {
  for (const PlanOptions& options : small_plans()) {
    EXPECT_NO_THROW(plan(options).lower()) << words(options);
  }
}

TEST(Planner, SplitRoutesTheEncodersOutput) {
  PlanOptions options{
      .kind = "interleaved", .ranks = 3, .microbatches = 4, .chunks = 2};
  const Schedule plain = plan(options);
  options.split = 2;
  EXPECT_EQ(plan(options), plain);
  options.via = "direct";
  const Schedule direct = plan(options);
  EXPECT_EQ(direct.routes, (std::vector<Route>{{1, 3}, {1, 4}, {1, 5}}));
  EXPECT_EQ(direct.rows, plain.rows);
  options.split = 5;
  EXPECT_TRUE(plan(options).routes.empty());
  options.split = 6;
  EXPECT_NE(refusal(options).find("(argument 'split')"), std::string::npos);
  options.split = 2;
  options.via = "both";
  EXPECT_NE(refusal(options).find("(argument 'via')"), std::string::npos);
  options = {.kind = "none", .ranks = 1, .microbatches = 1};
  options.split = 1;
  EXPECT_EQ(
      refusal(options),
      "plan: expected two or more stages beside a split, but got 1 (argument "
      "'split')");
  options = {.kind = "gpipe", .ranks = 300, .microbatches = 1};
  options.split = 1;
  EXPECT_EQ(refusal(options), "none");
  options.via = "direct";
  EXPECT_NE(refusal(options).find("at most 254 routes"), std::string::npos);
}

TEST(Planner, OptionsThatAKindHasNoUseForAreRefused) {
  for (const std::string& kind : kinds()) {
    PlanOptions options{.kind = kind, .ranks = 1, .microbatches = 4};
    options.group_size = 2;
    const bool groups = kind == "interleaved" || kind == "auto";
    EXPECT_EQ(
        refusal(options),
        groups ? "none"
               : "plan: expected no group_size for kind " + kind +
                     ", but got 2 (argument 'group_size')");
    options.group_size = 0;
    options.warmup = 0;
    const bool warms = kind == "1f1b" || kind == "auto";
    EXPECT_EQ(
        refusal(options),
        warms ? "none"
              : "plan: expected no warmup for kind " + kind +
                    ", but got 0 (argument 'warmup')");
    EXPECT_EQ(refusal(options), [&]() -> std::string {
      try {
        plan_rank(options, 0);
      } catch (const std::invalid_argument& error) {
        return error.what();
      }
      return "none";
    }());
    options.warmup = -1;
    options.via = "direct";
    EXPECT_EQ(
        refusal(options),
        "plan: expected a split beside via direct, but got none (argument "
        "'split')");
  }
}

TEST(Planner, RefusalsNameArgumentAndNearestKind) {
  EXPECT_NE(
      refusal({"1fb1", 2, 2})
          .find("but got '1fb1' (argument 'kind'), perhaps for '1f1b'"),
      std::string::npos);
  EXPECT_NE(
      refusal({"zb-v", 2, 2}).find("perhaps for 'zbv'"), std::string::npos);
  EXPECT_EQ(
      refusal({"dualpipe_v", 4, 6}),
      "plan: dualpipe_v expected microbatches >= 8 (2 x ranks), but got 6 "
      "(argument 'microbatches')");
  EXPECT_EQ(
      refusal({"zb_h1", 2, 2, 2}),
      "plan: expected 1 chunk for kind zb_h1, but got 2 (argument 'chunks')");
  EXPECT_EQ(
      refusal({"v_min", 2, 2, 3}),
      "plan: expected 2 chunks for kind v_min, but got 3 (argument 'chunks')");
  EXPECT_EQ(
      refusal({"none", 2, 2}),
      "plan: expected 1 rank for kind none, but got 2 (argument 'ranks')");
  for (const char* argument : {"ranks", "microbatches", "chunks"}) {
    for (const int64_t value : {int64_t{-1}, int64_t{0}, int64_t{1} << 33}) {
      PlanOptions options{.kind = "interleaved", .ranks = 2, .microbatches = 2};
      const std::string name = argument;
      (name == "ranks"          ? options.ranks
       : name == "microbatches" ? options.microbatches
                                : options.chunks) = value;
      const std::string found = refusal(options);
      if (name == "chunks" && value == 0) {
        EXPECT_EQ(found, "none");
      } else {
        EXPECT_NE(found.find("(argument '" + name + "')"), std::string::npos)
            << found;
      }
    }
  }
  PlanOptions options{.kind = "1f1b", .ranks = 3, .microbatches = 2};
  options.max_pending = 0;
  EXPECT_EQ(
      refusal(options),
      "plan: expected max_pending of at least 1, but got 0 (argument "
      "'max_pending')");
  options.max_pending = 1;
  options.link_cost = -1;
  EXPECT_NE(
      refusal(options).find("but got -1 (argument 'link_cost')"),
      std::string::npos);
  options.link_cost = 0;
  options.costs.emplace();
  options.costs->stages.resize(2);
  EXPECT_NE(
      refusal(options).find("expected 1 or 3 entries, but got 2"),
      std::string::npos);
}

} // namespace
} // namespace torch_sm3::pipeline
