// SPDX-License-Identifier: Apache-2.0
// What lowering is defined by, the slow and obvious way.
#pragma once

#include <pipeline_random.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <map>
#include <set>
#include <vector>

namespace torch_sm3::pipeline {

// When the cell of a step starts, and when its result is there.
struct Run {
  uint32_t start = 0;
  uint32_t end = 0;

  friend bool operator==(const Run&, const Run&) = default;
};
using Runs = std::map<Step, Run>;

// All steps at one unit per action, three per B, by trying until nothing
// changes.
inline Runs runs_of(const RandomSchedule& made) {
  const Schedule& s = made.schedule;
  Runs runs;
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
            start = std::max(start, runs[need].end);
          }
        }
        clock = start;
        for (const Action a : cell) {
          clock += a.op == Op::kBackward ? 3 : 1;
          if (is_compute(a.op)) {
            Run& known = runs[{a.op, a.stage, a.microbatch}];
            changed = changed || known != Run{start, clock};
            known = {start, clock};
          }
        }
      }
    }
  }
  return runs;
}

inline Step step_of(Action action) {
  return {action.op, action.stage, action.microbatch};
}

// The other end of a message.
inline uint32_t other_stage(const Schedule& s, Action a) {
  if (a.flags > 0) {
    const Route route = s.routes[a.flags - 1u];
    return a.stage == route.source ? route.target : route.source;
  }
  const bool up = a.op == Op::kSendForward || a.op == Op::kRecvBackward;
  return up ? a.stage + 1u : a.stage - 1u;
}

inline bool is_send(Op op) {
  return op == Op::kSendForward || op == Op::kSendBackward;
}

// (class, producing stage, consuming stage, route, microbatch)
using Letter = std::tuple<bool, uint32_t, uint32_t, uint8_t, uint32_t>;

inline Letter letter_of(const Schedule& s, Action a) {
  const bool forward = a.op == Op::kSendForward || a.op == Op::kRecvForward;
  const uint32_t other = other_stage(s, a);
  return is_send(a.op) ? Letter{forward, a.stage, other, a.flags, a.microbatch}
                       : Letter{forward, other, a.stage, a.flags, a.microbatch};
}

// Every message that must travel.
inline std::set<Letter> letters_of(const RandomSchedule& made) {
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
inline bool runs_with_blocking_sends(const Schedule& s) {
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

inline std::vector<Gap>
gaps_of(const std::vector<Action>& row, const Runs& runs) {
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
    const auto first = runs.find(step_of(next.cell.front()));
    const auto last = runs.find(step_of(next.cell.back()));
    next.before = first == runs.end() ? clock : first->second.start;
    clock = last == runs.end() ? clock + 1 : last->second.end;
    gaps.back().after = next.before;
    gaps.push_back(next);
  }
  return gaps;
}

inline int order_in_gap(Op op) {
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

} // namespace torch_sm3::pipeline
