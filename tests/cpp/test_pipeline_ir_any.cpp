// SPDX-License-Identifier: Apache-2.0
// Lowering against its definition, on schedules that nobody planned.
#include <pipeline_lowering.h>
#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/verifier.h>

#include <gtest/gtest.h>

#include <map>

namespace torch_sm3::pipeline {
namespace {

// A random schedule, lowered, and when its steps start.
struct Trial {
  explicit Trial(uint32_t seed) {
    std::mt19937 random(seed);
    made_ = random_schedule(&random);
    lowered_ = made_.schedule.lower();
    runs_ = runs_of(made_);
  }

  bool holds(const std::vector<Action>& cell, Op op, Action message) const {
    return std::any_of(cell.begin(), cell.end(), [&](Action a) {
      return a.stage == message.stage && a.microbatch == message.microbatch &&
             (op == Op::kForward ? a.op == op : gives_input_gradient(a.op));
    });
  }

  uint32_t weights_end(uint32_t stage) const {
    uint32_t end = 0;
    for (const auto& [step, run] : runs_) {
      if (std::get<1>(step) == stage &&
          gives_weight_gradient(std::get<0>(step))) {
        end = std::max(end, run.end);
      }
    }
    return end;
  }

  void check_cells() const;
  void check_letters() const;
  void check_places() const;
  void check_reductions() const;
  void check_progress() const;

  RandomSchedule made_;
  Schedule lowered_;
  Runs runs_;
};

void Trial::check_cells() const {
  EXPECT_EQ(lowered_.lower(), lowered_);
  EXPECT_EQ(Schedule::parse(lowered_.text()), lowered_);
  // Reading CSV verifies it too.
  EXPECT_EQ(Schedule::from_csv(lowered_.to_csv()), lowered_);
  EXPECT_EQ(Schedule::from_csv(made_.schedule.to_csv()).lower(), lowered_);
  for (uint32_t rank = 0; rank < lowered_.ranks; ++rank) {
    std::vector<Action> cells;
    for (const Action a : lowered_.rows[rank]) {
      if (is_compute(a.op) || a.op == Op::kIdle) {
        cells.push_back(a);
      }
    }
    EXPECT_EQ(cells, made_.schedule.rows[rank]);
  }
}

void Trial::check_letters() const {
  std::vector<Letter> sent;
  std::vector<Letter> received;
  for (const auto& row : lowered_.rows) {
    for (const Action a : row) {
      if (is_message(a.op)) {
        (is_send(a.op) ? sent : received).push_back(letter_of(lowered_, a));
      }
    }
  }
  std::sort(sent.begin(), sent.end());
  std::sort(received.begin(), received.end());
  const std::set<Letter> letters = letters_of(made_);
  EXPECT_EQ(sent, std::vector<Letter>(letters.begin(), letters.end()));
  EXPECT_EQ(received, sent);
}

void Trial::check_places() const {
  for (const auto& row : lowered_.rows) {
    for (const Gap& gap : gaps_of(row, runs_)) {
      EXPECT_TRUE(
          std::is_sorted(
              gap.added.begin(), gap.added.end(), [](Action a, Action b) {
                return order_in_gap(a.op) < order_in_gap(b.op);
              }));
      for (const Action a : gap.added) {
        if (!is_message(a.op)) {
          continue;
        }
        const bool forward =
            a.op == Op::kSendForward || a.op == Op::kRecvForward;
        if (is_send(a.op)) {
          EXPECT_TRUE(
              holds(gap.cell, forward ? Op::kForward : Op::kBackward, a));
          continue;
        }
        const uint32_t from = other_stage(lowered_, a);
        const Op op = forward             ? Op::kForward
                      : made_.split[from] ? Op::kBackwardInput
                                          : Op::kBackward;
        const uint32_t sent = runs_.at({op, from, a.microbatch}).end;
        EXPECT_LE(sent, gap.after) << lowered_.text(a);
        EXPECT_TRUE(gap.first || gap.before < sent) << lowered_.text(a);
      }
    }
  }
}

void Trial::check_reductions() const {
  bool training = false;
  for (uint32_t stage = 0; stage < lowered_.stages; ++stage) {
    training = training || weights_end(stage) > 0;
  }
  for (uint32_t rank = 0; rank < lowered_.ranks; ++rank) {
    const auto& row = lowered_.rows[rank];
    std::map<uint32_t, uint32_t> seen; // weight gradients and ties of a stage
    std::vector<uint32_t> reduced;
    std::vector<uint32_t> tied;
    for (const Gap& gap : gaps_of(row, runs_)) {
      for (const Action a : gap.cell) {
        seen[a.stage] += gives_weight_gradient(a.op) ? 1 : 0;
      }
      for (const Action a : gap.added) {
        if (a.op == Op::kTieReduce) {
          tied.push_back(a.microbatch);
          uint32_t ready = 0;
          for (const uint16_t member : lowered_.ties[a.microbatch]) {
            ready = std::max(ready, weights_end(member));
            if (lowered_.placement[member] == rank) {
              ++seen[member];
            }
          }
          EXPECT_LE(ready, gap.after);
          EXPECT_TRUE(gap.first || gap.before < ready);
        } else if (a.op == Op::kReduceGrad) {
          reduced.push_back(a.stage);
          uint32_t wanted = lowered_.microbatches;
          for (const auto& members : lowered_.ties) {
            wanted += static_cast<uint32_t>(
                std::count(members.begin(), members.end(), a.stage));
          }
          EXPECT_EQ(seen[a.stage], wanted);
          seen[a.stage] = 0; // ready in this gap, not in one before
        }
      }
      // What could be reduced has been.
      for (const auto& [stage, count] : seen) {
        const bool all = count >= lowered_.microbatches;
        bool waits = false;
        for (size_t tie = 0; tie < lowered_.ties.size(); ++tie) {
          const auto& members = lowered_.ties[tie];
          waits =
              waits || (std::count(members.begin(), members.end(), stage) > 0 &&
                        std::count(tied.begin(), tied.end(), tie) == 0);
        }
        EXPECT_TRUE(!all || waits) << "stage " << stage;
      }
    }
    std::vector<uint32_t> wanted;
    std::set<uint32_t> wanted_ties;
    for (uint32_t stage = 0; stage < lowered_.stages; ++stage) {
      if (training && lowered_.placement[stage] == rank) {
        wanted.push_back(stage);
        for (uint32_t tie = 0; tie < lowered_.ties.size(); ++tie) {
          const auto& members = lowered_.ties[tie];
          if (std::count(members.begin(), members.end(), stage) > 0) {
            wanted_ties.insert(tie);
          }
        }
      }
    }
    std::sort(reduced.begin(), reduced.end());
    std::sort(tied.begin(), tied.end());
    EXPECT_EQ(reduced, wanted);
    EXPECT_EQ(
        tied, std::vector<uint32_t>(wanted_ties.begin(), wanted_ties.end()));
    EXPECT_EQ(!row.empty() && row.back().op == Op::kOptimizer, training);
  }
}

void Trial::check_progress() const {
  EXPECT_TRUE(runs_with_blocking_sends(lowered_));
  for (const Links links :
       {Links::kPosted, Links::kRendezvous, Links::kBlocking}) {
    VerifyOptions options;
    options.links.links = links;
    const Report report = verify(lowered_, options);
    EXPECT_TRUE(report.valid()) << report.message;
  }
}

template <void (Trial::*check)() const>
void try_all() {
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    const Trial trial(seed);
    SCOPED_TRACE(trial.lowered_.text());
    (trial.*check)();
    if (testing::Test::HasFailure()) {
      return;
    }
  }
}

TEST(AnySchedule, IsLoweredOnceAndKeepsItsCells) {
  try_all<&Trial::check_cells>();
}

TEST(AnySchedule, SendsAndReceivesEachMessageOnce) {
  try_all<&Trial::check_letters>();
}

TEST(AnySchedule, PutsMessagesWhereTheyBelong) {
  try_all<&Trial::check_places>();
}

TEST(AnySchedule, ReducesOnceAndAsEarlyAsItMay) {
  try_all<&Trial::check_reductions>();
}

TEST(AnySchedule, RunsEvenWithBlockingSends) {
  try_all<&Trial::check_progress>();
}

TEST(EveryPlan, RunsEvenWithBlockingSends) {
  size_t plans = 0;
  for (const std::string& kind : kinds()) {
    for (int64_t p = 1; p <= 5 && kind != "auto"; ++p) {
      for (int64_t m = 1; m <= 11; ++m) {
        for (int64_t v = 0; v <= 3; ++v) {
          Schedule schedule;
          try {
            schedule = plan({kind, p, m, v});
          } catch (const std::invalid_argument&) {
            continue; // not of this kind
          }
          const Schedule lowered = schedule.lower();
          EXPECT_TRUE(runs_with_blocking_sends(lowered)) << lowered.text();
          EXPECT_EQ(lowered.lower(), lowered);
          ++plans;
        }
      }
    }
  }
  EXPECT_GT(plans, 11 * 4 * 11);
}

TEST(AnySchedule, TheBlockingRunFindsDeadlocks) {
  EXPECT_FALSE(runs_with_blocking_sends(
      Schedule::parse(
          "schedule 1 kind=x ranks=2 stages=2 microbatches=2 placement=loop\n"
          "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
          "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1\n")));
}

} // namespace
} // namespace torch_sm3::pipeline
