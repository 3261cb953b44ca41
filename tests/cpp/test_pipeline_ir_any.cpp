// SPDX-License-Identifier: Apache-2.0
// Lowering against its definition, on schedules that nobody planned.
#include <pipeline_random.h>
#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/verifier.h>

#include <gtest/gtest.h>

#include <deque>
#include <limits>
#include <map>

namespace torch_sm3::pipeline {
namespace {

// When each step starts at one unit per cell, by trying until nothing changes.
std::map<Step, uint32_t> starts_of(const RandomSchedule& made) {
  const Schedule& s = made.schedule;
  std::map<Step, uint32_t> starts;
  for (bool changed = true; changed;) {
    changed = false;
    for (const auto& row : s.rows) {
      uint32_t clock = 0;
      for (size_t i = 0; i < row.size(); ++i) {
        std::vector<Action> cell{row[i]};
        if (row[i].flags == kPaired) {
          cell.push_back(row[++i]);
        }
        uint32_t start = clock;
        for (const Action a : cell) {
          const Step step{a.op, a.stage, a.microbatch};
          for (const Step& need : is_compute(a.op)
                                      ? needs_of(s, step, made.split)
                                      : std::vector<Step>{}) {
            start = std::max(start, starts[need] + 1);
          }
        }
        for (const Action a : cell) {
          if (is_compute(a.op)) {
            uint32_t& known = starts[{a.op, a.stage, a.microbatch}];
            changed = changed || known != start;
            known = start;
          }
        }
        clock = start + 1;
      }
    }
  }
  return starts;
}

Step step_of(Action action) {
  return {action.op, action.stage, action.microbatch};
}

// The other end of a message.
uint32_t other_stage(const Schedule& s, Action a) {
  if (a.flags > 0) {
    const Route route = s.routes[a.flags - 1u];
    return a.stage == route.source ? route.target : route.source;
  }
  const bool up = a.op == Op::kSendForward || a.op == Op::kRecvBackward;
  return up ? a.stage + 1u : a.stage - 1u;
}

bool is_send(Op op) {
  return op == Op::kSendForward || op == Op::kSendBackward;
}

// (class, producing stage, consuming stage, route, microbatch)
using Letter = std::tuple<bool, uint32_t, uint32_t, uint8_t, uint32_t>;

Letter letter_of(const Schedule& s, Action a) {
  const bool forward = a.op == Op::kSendForward || a.op == Op::kRecvForward;
  const uint32_t other = other_stage(s, a);
  return is_send(a.op) ? Letter{forward, a.stage, other, a.flags, a.microbatch}
                       : Letter{forward, other, a.stage, a.flags, a.microbatch};
}

// Every message that must travel.
std::set<Letter> letters_of(const RandomSchedule& made) {
  const Schedule& s = made.schedule;
  std::set<Letter> letters;
  const auto send =
      [&](bool forward, uint32_t from, uint32_t to, uint8_t flags) {
        for (uint32_t i = 0;
             s.placement[from] != s.placement[to] && i < s.microbatches;
             ++i) {
          letters.insert({forward, from, to, flags, i});
        }
      };
  bool training = false;
  for (const auto& row : s.rows) {
    for (const Action a : row) {
      training = training || gives_input_gradient(a.op);
    }
  }
  for (uint32_t stage = 0; stage + 1 < s.stages; ++stage) {
    send(true, stage, stage + 1, 0);
    if (training) {
      send(false, stage + 1, stage, 0);
    }
  }
  for (size_t i = 0; i < s.routes.size(); ++i) {
    const auto flags = static_cast<uint8_t>(i + 1);
    send(true, s.routes[i].source, s.routes[i].target, flags);
    if (training) {
      send(false, s.routes[i].target, s.routes[i].source, flags);
    }
  }
  return letters;
}

// Runs a lowered schedule whose sends wait until they are matched, all messages
// of a directed link in one order. True if it comes to its end.
bool runs_with_blocking_sends(const Schedule& s) {
  std::vector<size_t> at(s.ranks, 0);
  std::map<std::pair<uint32_t, uint32_t>, std::deque<Letter>> posted;
  std::set<Letter> here;
  for (bool moved = true; moved;) {
    moved = false;
    for (uint32_t rank = 0; rank < s.ranks; ++rank) {
      const auto& row = s.rows[rank];
      if (at[rank] == row.size()) {
        continue;
      }
      const Action a = row[at[rank]];
      bool go = true;
      if (is_message(a.op)) {
        const uint32_t peer = s.placement[other_stage(s, a)];
        const Letter letter = letter_of(s, a);
        if (is_send(a.op)) {
          auto& waiting = posted[{rank, peer}];
          go = !waiting.empty();
          if (go) {
            EXPECT_EQ(waiting.front(), letter);
            waiting.pop_front();
            here.insert(letter);
          }
        } else {
          posted[{peer, rank}].push_back(letter);
        }
      } else if (is_compute(a.op)) {
        // What it waits for is what was posted for it before.
        for (size_t i = 0; i < at[rank]; ++i) {
          const Action b = row[i];
          const bool forward = b.op == Op::kRecvForward;
          if ((forward && a.op == Op::kForward) ||
              (b.op == Op::kRecvBackward && gives_input_gradient(a.op))) {
            go = go && (b.stage != a.stage || b.microbatch != a.microbatch ||
                        here.count(letter_of(s, b)) > 0);
          }
        }
      } else if (a.op == Op::kTieReduce) {
        // All ranks with a member enter together.
        for (const uint16_t member : s.ties[a.microbatch]) {
          const uint32_t peer = s.placement[member];
          const auto& other = s.rows[peer];
          const auto found =
              std::find_if(other.begin(), other.end(), [&](Action b) {
                return b.op == a.op && b.microbatch == a.microbatch;
              });
          go = go && at[peer] >= static_cast<size_t>(found - other.begin());
        }
      }
      if (go) {
        ++at[rank];
        moved = true;
      }
    }
  }
  for (uint32_t rank = 0; rank < s.ranks; ++rank) {
    if (at[rank] < s.rows[rank].size()) {
      return false;
    }
  }
  return true;
}

// What lowering adds between two cells of a row, and when they start.
struct Gap {
  uint32_t before = 0; // start of the cell before, if there is one
  bool first = true;
  uint32_t after = std::numeric_limits<uint32_t>::max();
  std::vector<Action> cell;  // the cell before
  std::vector<Action> added; // all that is not a cell
};

std::vector<Gap> gaps_of(
    const std::vector<Action>& row,
    const std::map<Step, uint32_t>& starts) {
  std::vector<Gap> gaps(1);
  uint32_t clock = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    if (!is_compute(row[i].op) && row[i].op != Op::kIdle) {
      gaps.back().added.push_back(row[i]);
      continue;
    }
    Gap next;
    next.first = false;
    next.cell = {row[i]};
    if (row[i].flags == kPaired) {
      next.cell.push_back(row[++i]);
    }
    // An idle slot starts as soon as it can.
    const auto found = starts.find(step_of(next.cell[0]));
    next.before = is_compute(next.cell[0].op) ? found->second : clock;
    clock = next.before + 1;
    gaps.back().after = next.before;
    gaps.push_back(next);
  }
  return gaps;
}

int order_in_gap(Op op) {
  switch (op) {
    case Op::kRecvForward:
    case Op::kRecvBackward:
      return 0;
    case Op::kSendForward:
    case Op::kSendBackward:
      return 1;
    case Op::kOptimizer:
      return 3;
    default:
      return 2;
  }
}

// A random schedule, lowered, and when its steps start.
struct Trial {
  explicit Trial(uint32_t seed) {
    std::mt19937 random(seed);
    made_ = random_schedule(&random);
    lowered_ = made_.schedule.lower();
    starts_ = starts_of(made_);
  }

  bool holds(const std::vector<Action>& cell, Op op, Action message) const {
    return std::any_of(cell.begin(), cell.end(), [&](Action a) {
      return a.stage == message.stage && a.microbatch == message.microbatch &&
             (op == Op::kForward ? a.op == op : gives_input_gradient(a.op));
    });
  }

  uint32_t weights_end(uint32_t stage) const {
    uint32_t end = 0;
    for (const auto& [step, start] : starts_) {
      if (std::get<1>(step) == stage &&
          gives_weight_gradient(std::get<0>(step))) {
        end = std::max(end, start + 1);
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
  std::map<Step, uint32_t> starts_;
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
    for (const Gap& gap : gaps_of(row, starts_)) {
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
        const uint32_t sent = starts_.at({op, from, a.microbatch}) + 1;
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
    for (const Gap& gap : gaps_of(row, starts_)) {
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
