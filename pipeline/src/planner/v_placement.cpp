// SPDX-License-Identifier: Apache-2.0
// Two chunks per rank on a V, backwards in two parts: zbv, v_half and v_min.
//
// Stage s lies on rank s on the way down and on rank 2p - 1 - s on the way up,
// so that all ranks hold activations equally long in sum. The schedules are
// periodic: microbatch i does what microbatch 0 did, 6 units later (F, I and W
// of two chunks, one unit each). The period fixes when F and I of a stage come
// due; its length of life, hence memory, is what tells the three kinds apart.
// All ranks are then run in lock step, one unit at a time: what is due first
// runs as soon as it can, and weight gradients fill the rest.
#include <planner/planning.h>

#include <algorithm>
#include <array>
#include <stdexcept>

namespace torch_sm3::pipeline {
namespace {

constexpr uint32_t kPeriod = 6;

// When F and I of microbatch 0 are due: units from one rank to the next on the
// way down and on the way up (the same for F and I), and from one way to the
// other. Chosen such that on no rank two of the four fall on one unit of the
// period.
struct Pattern {
  uint32_t down = 1;
  uint32_t up = 1;
  uint32_t forward_turn = 1; // F of stage p - 1 to F of stage p
  uint32_t top = 1;          // F of the last stage to its I
  uint32_t input_turn = 1;   // I of stage p to I of stage p - 1
  // On the way down, half a period more from this rank on.
  uint32_t late_rank = ~0u;
  uint32_t capacity = 0; // chunks in flight on a rank
  // What is due next runs next; otherwise what can run overtakes it.
  bool strict = false;
  // Before its first I a rank runs all forwards it can.
  bool eager = false;
};

Pattern pattern_of(VKind kind, uint32_t p) {
  switch (kind) {
    case VKind::kZeroBubble:
      return {
          .down = 3, .up = 3, .capacity = 2 * p, .strict = true, .eager = true};
    case VKind::kHalf:
      // For even p the ways down and up would collide on half of the ranks.
      return {
          .down = 1,
          .up = 2,
          .input_turn = 2,
          .late_rank = p % 2 == 0 ? p / 4 * 2 : ~0u,
          .capacity = (p + 2) / 2 * 2};
    case VKind::kMin:
      // At one unit per hop F and I collide on all ranks if 3 divides p.
      return {
          .top = p % 3 == 0 ? 3u : 1u,
          .capacity = (p + 4) / 3 * 2,
          .strict = p % 3 != 0};
  }
  throw std::logic_error("plan: no such V");
}

class LockStep {
 public:
  LockStep(const Sizes& sizes, VKind kind, VRoom more)
      : p_(sizes.ranks),
        m_(sizes.microbatches),
        last_(2 * sizes.ranks - 1),
        more_(more),
        pattern_(pattern_of(kind, sizes.ranks)),
        stages_(size_t{2} * sizes.ranks) {
    pattern_.capacity += more.chunks;
    // With more room, what can run early is worth more than the pattern.
    pattern_.strict = pattern_.strict && more.chunks == 0;
    const auto down = [&](uint32_t rank) {
      return pattern_.down * rank +
             (rank >= pattern_.late_rank ? kPeriod / 2 : 0);
    };
    const auto up = [&](uint32_t rank) {
      return pattern_.up * (p_ - 1 - rank);
    };
    const uint32_t forward_up = down(p_ - 1) + pattern_.forward_turn;
    const uint32_t input_up = forward_up + up(0) + pattern_.top;
    const uint32_t input_down = input_up + down(p_ - 1) + pattern_.input_turn;
    for (uint32_t rank = 0; rank < p_; ++rank) {
      stages_[rank].forward_due = down(rank);
      stages_[last_ - rank].forward_due = forward_up + up(rank);
      stages_[last_ - rank].input_due = input_up + down(rank);
      stages_[rank].input_due = input_down + up(rank);
    }
  }

  Rows run(RankRange range) {
    Rows rows(range.last - range.first);
    for (Row& row : rows) {
      row.reserve(size_t{kPeriod} * m_);
    }
    std::vector<Action> chosen(p_);
    for (uint64_t left = uint64_t{kPeriod} * m_ * p_; left > 0;) {
      // All look at what was done before this unit, then all act.
      for (uint32_t rank = 0; rank < p_; ++rank) {
        chosen[rank] = choose(rank);
      }
      const uint64_t before = left;
      for (uint32_t rank = 0; rank < p_; ++rank) {
        if (chosen[rank].op == Op::kIdle) {
          continue;
        }
        --left;
        ++count(chosen[rank]);
        if (range.holds(rank)) {
          rows[rank - range.first].push_back(chosen[rank]);
        }
      }
      if (left == before) {
        throw std::logic_error("plan: no rank of the V can go on");
      }
    }
    return rows;
  }

 private:
  struct Stage {
    uint32_t forwards = 0; // done so far
    uint32_t inputs = 0;
    uint32_t weights = 0;
    uint32_t forward_due = 0; // of microbatch 0
    uint32_t input_due = 0;

    uint32_t flight() const {
      return forwards - weights;
    }
    uint32_t owed() const {
      return inputs - weights;
    }
  };

  uint32_t& count(Action action) {
    Stage& stage = stages_[action.stage];
    return action.op == Op::kForward         ? stage.forwards
           : action.op == Op::kBackwardInput ? stage.inputs
                                             : stage.weights;
  }

  bool can_forward(uint32_t s, uint32_t rank) const {
    const uint32_t i = stages_[s].forwards;
    const uint32_t flight =
        stages_[rank].flight() + stages_[last_ - rank].flight();
    return i < m_ && flight < pattern_.capacity &&
           (s == 0 || stages_[s - 1].forwards > i);
  }

  bool can_input(uint32_t s) const {
    const uint32_t i = stages_[s].inputs;
    return stages_[s].forwards > i && (s == last_ || stages_[s + 1].inputs > i);
  }

  // The first stage's activations must leave room for those of the second,
  // without which no gradient ever comes back: as many as live at once in the
  // steady state, from F to one unit after I.
  uint32_t room_below(uint32_t rank) const {
    const Stage& stage = stages_[rank];
    const uint32_t life = stage.input_due + 1 - stage.forward_due;
    return std::min(pattern_.capacity - 1, life / kPeriod + 1 + more_.first);
  }

  Action choose(uint32_t rank) const {
    const uint32_t above = last_ - rank;
    const Action action = pattern_.eager && stages_[above].inputs == 0
                              ? warm_up(rank, above)
                              : due(rank, above);
    return action.op == Op::kIdle ? owed_weight(rank, above) : action;
  }

  // Never waits from its first F to its first I if there is a forward at all;
  // 2p of them fill the time until the first gradient is back.
  Action warm_up(uint32_t rank, uint32_t above) const {
    if (can_input(above)) {
      return compute(Op::kBackwardInput, above, 0);
    }
    if (can_forward(above, rank)) {
      return compute(Op::kForward, above, stages_[above].forwards);
    }
    if (can_forward(rank, rank) && stages_[rank].forwards < last_ - rank) {
      return compute(Op::kForward, rank, stages_[rank].forwards);
    }
    return {};
  }

  // The F or I that is due first: of all that are left if the pattern is
  // strict, else of those that can run.
  Action due(uint32_t rank, uint32_t above) const {
    Action best;
    bool runs = false;
    uint64_t soonest = ~uint64_t{0};
    const auto offer =
        [&](Op op, uint32_t s, uint32_t i, uint32_t first, bool can) {
          const uint64_t time = first + uint64_t{kPeriod} * i;
          if (i < m_ && time < soonest && (can || pattern_.strict)) {
            best = compute(op, s, i);
            soonest = time;
            runs = can;
          }
        };
    for (const uint32_t s : {rank, above}) {
      const Stage& stage = stages_[s];
      const bool room =
          pattern_.strict || s == above || stage.flight() < room_below(rank);
      offer(
          Op::kForward,
          s,
          stage.forwards,
          stage.forward_due,
          room && can_forward(s, rank));
      offer(Op::kBackwardInput, s, stage.inputs, stage.input_due, can_input(s));
    }
    return runs ? best : Action{};
  }

  Action owed_weight(uint32_t rank, uint32_t above) const {
    const uint32_t s =
        stages_[above].owed() >= stages_[rank].owed() ? above : rank;
    if (stages_[s].owed() == 0) {
      return {};
    }
    return compute(Op::kBackwardWeight, s, stages_[s].weights);
  }

  uint32_t p_;
  uint32_t m_;
  uint32_t last_;
  VRoom more_;
  Pattern pattern_;
  std::vector<Stage> stages_;
};

} // namespace

Rows v_rows(const Sizes& sizes, RankRange range, VKind kind, VRoom more) {
  return LockStep(sizes, kind, more).run(range);
}

} // namespace torch_sm3::pipeline
