// SPDX-License-Identifier: Apache-2.0
// The verifier's one greedy run against all interleavings of small schedules.
#include <pipeline_interleavings.h>
#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/verifier.h>

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <random>

namespace torch_sm3::pipeline {
namespace {

using testing::Interleavings;

constexpr std::array<LinkModel, 4> kModels{
    {{Links::kPosted, 1},
     {Links::kRendezvous, 1},
     {Links::kRendezvous, 2},
     {Links::kBlocking, 1}}};

Rule rule_of(const Schedule& schedule, LinkModel links) {
  VerifyOptions options;
  options.links = links;
  return verify(schedule, options).rule;
}

std::vector<Schedule> small_plans() {
  std::vector<Schedule> plans;
  for (int64_t p = 1; p <= 3; ++p) {
    for (int64_t m = 1; m <= 3; ++m) {
      for (const std::string& kind : kinds()) {
        if (kind == "auto" || (kind == "none" && p > 1) ||
            (kind == "dualpipe_v" && m < 2 * p)) {
          continue;
        }
        plans.push_back(plan({kind, p, m}));
      }
    }
  }
  // Routes and ties.
  Schedule chain = plan({"1f1b", 3, 3});
  chain.routes = {{0, 2}};
  chain.ties = {{0, 2}, {0, 1}};
  plans.push_back(chain);
  Schedule loop = plan({"interleaved", 2, 2, 2});
  loop.routes = {{0, 2}, {0, 3}};
  loop.ties = {{0, 3}};
  plans.push_back(loop);
  return plans;
}

TEST(Interleavings, EveryPlanRunsInEveryOrder) {
  for (const Schedule& schedule : small_plans()) {
    const Schedule lowered = schedule.lower();
    for (const LinkModel links : kModels) {
      EXPECT_FALSE(Interleavings(lowered, links).deadlock()) << lowered.text();
      EXPECT_EQ(rule_of(schedule, links), Rule::kNone) << lowered.text();
    }
  }
}

// Moves an action of some row a few places.
void move_one(Schedule* schedule, std::mt19937* random) {
  auto& row = schedule->rows[(*random)() % schedule->ranks];
  const auto from = (*random)() % row.size();
  const auto to = (*random)() % row.size();
  const Action action = row[from];
  row.erase(row.begin() + static_cast<std::ptrdiff_t>(from));
  row.insert(row.begin() + static_cast<std::ptrdiff_t>(to), action);
}

// Lets RECVs wait until the last moment, which keeps everything but the links
// happy.
void delay_receives(Schedule* schedule, std::mt19937* random) {
  auto& row = schedule->rows[(*random)() % schedule->ranks];
  for (size_t at = row.size() - 1; at-- > 0;) {
    if ((row[at].op != Op::kRecvForward && row[at].op != Op::kRecvBackward) ||
        (*random)() % 3 == 0) {
      continue;
    }
    for (size_t i = at; i + 1 < row.size(); ++i) {
      const Action next = row[i + 1];
      const bool uses = is_compute(next.op) && next.stage == row[i].stage &&
                        next.microbatch == row[i].microbatch;
      if (uses || next.op == Op::kRecvForward || next.op == Op::kRecvBackward) {
        break;
      }
      std::swap(row[i], row[i + 1]);
    }
  }
}

bool has_pairs(const Schedule& schedule) {
  for (const auto& row : schedule.rows) {
    for (const Action action : row) {
      if (is_compute(action.op) && action.flags != 0) {
        return true;
      }
    }
  }
  return false;
}

TEST(Interleavings, GreedyRunDecidesForChangedPlans) {
  std::mt19937 random(1);
  std::map<Rule, int> met;
  const std::vector<Schedule> plans = small_plans();
  for (int round = 0; round < 4000; ++round) {
    Schedule schedule = plans[random() % plans.size()].lower();
    if (schedule.ranks == 1 || has_pairs(schedule)) {
      continue;
    }
    for (uint32_t moves = random() % 3 + 1; moves > 0; --moves) {
      random() % 4 == 0 ? move_one(&schedule, &random)
                        : delay_receives(&schedule, &random);
    }
    for (const LinkModel links : kModels) {
      const Rule rule = rule_of(schedule, links);
      ++met[rule];
      if (rule != Rule::kNone && rule != Rule::kDeadlock &&
          rule != Rule::kDependencies) {
        continue;
      }
      const bool stuck = Interleavings(schedule, links).deadlock();
      // A SEND before its producer runs where nobody looks at what it sends.
      if (rule != Rule::kDependencies) {
        EXPECT_EQ(stuck, rule == Rule::kDeadlock)
            << static_cast<int>(links.links) << links.max_pending << "\n"
            << schedule.text();
      }
      if (rule == Rule::kDeadlock) {
        const LinkModel posted{Links::kPosted, 1};
        EXPECT_FALSE(Interleavings(schedule, posted).deadlock());
      }
    }
  }
  EXPECT_GT(met[Rule::kNone], 100);
  EXPECT_GT(met[Rule::kDependencies], 100);
  EXPECT_GT(met[Rule::kDeadlock], 20);
}

// Compute actions in any order: what lower() refuses is what cannot run.
TEST(Interleavings, RefusedOrdersOfComputeCannotRun) {
  std::mt19937 random(2);
  int refused = 0;
  for (int round = 0; round < 300; ++round) {
    Schedule schedule = plan({"1f1b", 3, 3});
    for (uint32_t moves = random() % 3 + 1; moves > 0; --moves) {
      move_one(&schedule, &random);
    }
    const Report report = verify(schedule);
    if (report.rule != Rule::kDependencies) {
      continue;
    }
    ++refused;
    EXPECT_THROW(schedule.lower(), ScheduleError);
    EXPECT_NE(report.grid.find('['), std::string::npos);
  }
  EXPECT_GT(refused, 20);
}

} // namespace
} // namespace torch_sm3::pipeline
