// SPDX-License-Identifier: Apache-2.0
// Each rule of the verifier on schedules that were spoiled in one place.
#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/verifier.h>

#include <gtest/gtest.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

using Row = std::vector<Action>;

std::vector<Schedule> lowered_plans() {
  std::vector<Schedule> plans;
  for (const std::string& kind : kinds()) {
    if (kind != "none" && kind != "auto") {
      Schedule schedule = plan({kind, 3, 6});
      if (kind == "1f1b") {
        schedule.routes = {{0, 2}};
        schedule.ties = {{0, 2}, {0, 1}};
      }
      plans.push_back(schedule.lower());
    }
  }
  return plans;
}

// The rule that counts an operation.
Rule rule_of(Op op) {
  if (is_compute(op)) {
    return Rule::kCounts;
  }
  return is_message(op) ? Rule::kMessages : Rule::kCollectives;
}

size_t index_of(const Row& row, Action action) {
  const auto found = std::find(row.begin(), row.end(), action);
  EXPECT_NE(found, row.end());
  return static_cast<size_t>(found - row.begin());
}

void move(Row* row, size_t from, size_t to) {
  const Action action = (*row)[from];
  row->erase(row->begin() + static_cast<std::ptrdiff_t>(from));
  row->insert(row->begin() + static_cast<std::ptrdiff_t>(to), action);
}

Schedule read(const std::string& rows, const std::string& more = "") {
  return Schedule::parse(
      "schedule 1 kind=x ranks=2 stages=2 microbatches=2 placement=loop" +
      more + "\n" + rows);
}

constexpr char kGood[] =
    "rank 0: 0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1 0REDUCE_GRAD "
    "OPTIM\n"
    "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD "
    "OPTIM\n";

TEST(Verifier, EveryPlanIsValidWithEveryLinkModel) {
  for (int64_t p = 1; p <= 5; ++p) {
    for (const int64_t m : {1, 2, 5, 12}) {
      for (const std::string& kind : kinds()) {
        if (kind == "auto" || (kind == "none" && p > 1) ||
            (kind == "dualpipe_v" && m < 2 * p)) {
          continue;
        }
        const Schedule schedule = plan({kind, p, m});
        for (const Links links :
             {Links::kPosted, Links::kRendezvous, Links::kBlocking}) {
          VerifyOptions options;
          options.links = {links, 1};
          const Report report = verify(schedule, options);
          EXPECT_TRUE(report.valid())
              << kind << " " << p << " " << m << ": " << report.message;
          EXPECT_NO_THROW(report.raise_if_invalid());
          EXPECT_TRUE(verify(schedule.lower(), options).valid());
        }
      }
    }
  }
}

TEST(Verifier, DroppedActionsAreCaught) {
  for (const Schedule& good : lowered_plans()) {
    for (uint32_t rank = 0; rank < good.ranks; ++rank) {
      for (size_t at = 0; at < good.rows[rank].size(); ++at) {
        Schedule bad = good;
        bad.rows[rank].erase(
            bad.rows[rank].begin() + static_cast<std::ptrdiff_t>(at));
        const Action action = good.rows[rank][at];
        const Report report = verify(bad);
        EXPECT_EQ(report.rule, rule_of(action.op))
            << good.kind << " " << good.text(action) << ": " << report.message;
        EXPECT_FALSE(report.grid.empty());
        EXPECT_THROW(report.raise_if_invalid(), ScheduleError);
      }
    }
  }
}

TEST(Verifier, DoubledActionsAreCaughtWhereverTheyStand) {
  for (const Schedule& good : lowered_plans()) {
    for (uint32_t rank = 0; rank < good.ranks; ++rank) {
      const size_t size = good.rows[rank].size();
      for (size_t at = 0; at < size; ++at) {
        const Action action = good.rows[rank][at];
        for (const size_t to : {at, at + 1, size}) {
          Schedule bad = good;
          bad.rows[rank].insert(
              bad.rows[rank].begin() + static_cast<std::ptrdiff_t>(to), action);
          const Report report = verify(bad);
          EXPECT_EQ(report.rule, rule_of(action.op))
              << good.kind << " " << good.text(action) << ": "
              << report.message;
          EXPECT_NE(report.message.find(good.text(action)), std::string::npos)
              << report.message;
        }
      }
    }
  }
}

TEST(Verifier, SwappedMessagesOfALinkAreCaught) {
  for (const Schedule& good : lowered_plans()) {
    for (uint32_t rank = 0; rank < good.ranks; ++rank) {
      Schedule bad = good;
      Row& row = bad.rows[rank];
      // Two RECVs of one kind and stage; they come early enough for both.
      const auto recv = std::find_if(row.begin(), row.end(), [](Action a) {
        return a.op == Op::kRecvForward;
      });
      if (recv == row.end()) {
        continue;
      }
      const auto next = std::find_if(recv + 1, row.end(), [&](Action a) {
        return a.op == recv->op && a.stage == recv->stage &&
               a.flags == recv->flags;
      });
      ASSERT_NE(next, row.end());
      move(
          &row,
          static_cast<size_t>(next - row.begin()),
          static_cast<size_t>(recv - row.begin()));
      EXPECT_EQ(verify(bad).rule, Rule::kMessages) << good.kind;
    }
  }
}

TEST(Verifier, MovedActionsAreCaught) {
  const auto rule_after = [](Action action, size_t to, uint32_t rank) {
    Schedule schedule = read(kGood);
    move(&schedule.rows[rank], index_of(schedule.rows[rank], action), to);
    return verify(schedule).rule;
  };
  EXPECT_EQ(verify(read(kGood)).rule, Rule::kNone);
  // A backward before its forward.
  EXPECT_EQ(rule_after({Op::kBackward, 0, 1, 0}, 0, 1), Rule::kCounts);
  // A SEND before its producer, a RECV after its consumer.
  EXPECT_EQ(rule_after({Op::kSendForward, 0, 0, 0}, 0, 0), Rule::kDependencies);
  EXPECT_EQ(
      rule_after({Op::kRecvBackward, 0, 0, 1}, 7, 0), Rule::kDependencies);
  // The last rank turns the microbatches around; its links keep their order.
  EXPECT_EQ(rule_after({Op::kForward, 0, 1, 1}, 2, 1), Rule::kDependencies);
  // Both messages of a link the other way round.
  EXPECT_EQ(rule_after({Op::kRecvForward, 0, 1, 1}, 0, 1), Rule::kMessages);
  // Reductions too early, optimizer before the reduction.
  EXPECT_EQ(rule_after({Op::kReduceGrad, 0, 0, 0}, 0, 0), Rule::kCollectives);
  EXPECT_EQ(rule_after({Op::kReduceGrad, 0, 0, 0}, 9, 0), Rule::kCollectives);
  EXPECT_EQ(rule_after({Op::kOptimizer, 0, 0, 0}, 3, 1), Rule::kCollectives);
}

TEST(Verifier, OtherCollectivesHaveTheirPlace) {
  EXPECT_TRUE(verify(read(
                         "rank 0: 0F0 0F1 VALIDATE 0B0 0B1\n"
                         "rank 1: 1F0 1B0 1F1 1B1"))
                  .valid());
  EXPECT_EQ(
      verify(read(
                 "rank 0: 0F0 0F1 0B0 VALIDATE 0B1\n"
                 "rank 1: 1F0 1B0 1F1 1B1"))
          .rule,
      Rule::kCollectives);
  // Members that meet two ties in different orders.
  Schedule schedule = plan({"1f1b", 2, 2});
  schedule.ties = {{0, 1}, {0, 1}};
  schedule = schedule.lower();
  EXPECT_TRUE(verify(schedule).valid());
  Row& row = schedule.rows[1];
  const size_t first = index_of(row, {Op::kTieReduce, 0, 1, 0});
  const size_t second = index_of(row, {Op::kTieReduce, 0, 1, 1});
  std::swap(row[first], row[second]);
  const Report report = verify(schedule);
  EXPECT_EQ(report.rule, Rule::kCollectives);
  EXPECT_NE(report.message.find("one order"), std::string::npos);
}

// Groups that only overlap may be met in any order that has no cycle.
TEST(Verifier, TiesInACycleAreCaught) {
  Schedule schedule = plan({"1f1b", 3, 1});
  schedule.ties = {{0, 1}, {1, 2}, {0, 2}};
  schedule = schedule.lower();
  ASSERT_TRUE(verify(schedule).valid());
  const auto set_order = [&](uint32_t rank, uint32_t first, uint32_t second) {
    Row& row = schedule.rows[rank];
    const auto is_tie = [](Action a) { return a.op == Op::kTieReduce; };
    const auto a = std::find_if(row.begin(), row.end(), is_tie);
    const auto b = std::find_if(a + 1, row.end(), is_tie);
    a->microbatch = first;
    b->microbatch = second;
  };
  set_order(0, 2, 0);
  set_order(1, 0, 1);
  set_order(2, 1, 2);
  const Report report = verify(schedule);
  EXPECT_EQ(report.rule, Rule::kDependencies) << report.message;
  EXPECT_NE(report.message.find("TIE_REDUCE"), std::string::npos);
}

// Numbers that are indices later must not lead outside.
TEST(Verifier, SchedulesThatDoNotFitAreReported) {
  const Schedule good = read(kGood);
  const auto spoil = [&](const auto& change) {
    Schedule bad = good;
    change(&bad);
    const Report report = verify(bad);
    EXPECT_EQ(report.rule, Rule::kCounts) << report.message;
  };
  spoil([](Schedule* s) { s->rows[0][0].stage = 7; });
  spoil([](Schedule* s) { s->rows[0][0].stage = 1; });
  spoil([](Schedule* s) { s->rows[0][0].microbatch = 7; });
  spoil([](Schedule* s) { s->rows[0][1].flags = 3; });
  spoil([](Schedule* s) { s->rows.pop_back(); });
  spoil([](Schedule* s) { s->placement.pop_back(); });
  spoil([](Schedule* s) { s->placement[0] = 9; });
  spoil([](Schedule* s) { s->microbatches = 4000000000u; });
  spoil([](Schedule* s) { s->ties = {{0, 9}}; });
  spoil([](Schedule* s) { s->routes = {{1, 0}}; });
  spoil([](Schedule* s) { s->rows[0][0] = {Op::kTieReduce, 0, 0, 3}; });
  spoil([](Schedule* s) { s->rows = {{}, {}}; });
}

TEST(Verifier, MessagesWithinARankAndBeyondTheEndsAreRefused) {
  Schedule schedule = read(kGood);
  schedule.rows[1].push_back({Op::kSendForward, 0, 1, 0});
  EXPECT_EQ(verify(schedule).rule, Rule::kMessages);
  schedule = read(kGood);
  schedule.rows[0].push_back({Op::kRecvForward, 0, 0, 0});
  EXPECT_EQ(verify(schedule).rule, Rule::kMessages);
  schedule = Schedule::parse(
      "schedule 1 kind=x ranks=1 stages=2 microbatches=1 placement=loop\n"
      "rank 0: 0F0 0SEND_F0 1RECV_F0 1F0\n");
  EXPECT_EQ(verify(schedule).rule, Rule::kMessages);
}

} // namespace
} // namespace torch_sm3::pipeline
