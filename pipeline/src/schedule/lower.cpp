// SPDX-License-Identifier: Apache-2.0
// Where the messages and collectives of a compute-only schedule go.
#include <schedule/arrivals.h>
#include <schedule/inventory.h>
#include <schedule/timing.h>

#include <limits>
#include <utility>

namespace torch_sm3::pipeline {
namespace {

// A TIE_REDUCE of one rank and when the last member can enter it.
struct Reduction {
  uint32_t time = 0;
  uint32_t tie = 0;
  uint16_t stage = 0;
};

class Lowering {
 public:
  Lowering(const Schedule& schedule, const Inventory& held)
      : schedule_(schedule),
        held_(held),
        timing_(schedule),
        arrivals_(schedule, timing_) {
    weights_left_.resize(schedule.stages);
    ties_left_.resize(schedule.stages);
    for (size_t stage = 0; stage < schedule.stages; ++stage) {
      weights_left_[stage] = timing_.weights(stage);
    }
    reductions_.resize(schedule.ranks);
    for (uint32_t tie = 0; tie < schedule.ties.size(); ++tie) {
      collect_reductions(tie);
    }
    for (auto& of_rank : reductions_) {
      std::sort(of_rank.begin(), of_rank.end(), [](Reduction a, Reduction b) {
        return std::pair(a.time, a.tie) < std::pair(b.time, b.tie);
      });
    }
  }

  Schedule run() {
    Schedule out{
        schedule_.kind,
        schedule_.ranks,
        schedule_.stages,
        schedule_.microbatches,
        schedule_.placement,
        schedule_.routes,
        schedule_.ties,
        std::vector<std::vector<Action>>(schedule_.ranks)};
    for (uint32_t rank = 0; rank < schedule_.ranks; ++rank) {
      if (!held_.messages) {
        arrivals_.collect(rank);
      }
      place(rank);
      out.rows[rank].assign(row_.begin(), row_.end());
    }
    return out;
  }

 private:
  bool crosses(size_t one, size_t other) const {
    return schedule_.placement[one] != schedule_.placement[other];
  }

  // Each rank with a member enters the collective once, for all its members.
  void collect_reductions(uint32_t tie) {
    uint32_t time = 0;
    for (const uint16_t stage : schedule_.ties[tie]) {
      ++ties_left_[stage];
      time = std::max(time, timing_.weights_end(stage));
    }
    if (time == 0 || held_.tied[tie]) {
      return;
    }
    for (const uint16_t stage : schedule_.ties[tie]) {
      auto& of_rank = reductions_[schedule_.placement[stage]];
      if (of_rank.empty() || of_rank.back().tie != tie) {
        of_rank.push_back({time, tie, stage});
      }
    }
  }

  void place(uint32_t rank) {
    row_.clear();
    sends_.clear();
    released_.clear();
    next_reduction_ = 0;
    const auto& row = schedule_.rows[rank];
    for (size_t i = 0; i < row.size();) {
      const Action action = row[i];
      if (is_message(action.op)) {
        row_.push_back(action);
        ++i;
        continue;
      }
      const uint32_t start = timing_.starts(rank)[i];
      fill_gap(rank, start, action.op == Op::kOptimizer);
      for (const size_t end = i + cell_size(row, i); i < end; ++i) {
        place_action(rank, row[i]);
      }
    }
    fill_gap(rank, std::numeric_limits<uint32_t>::max(), true);
    if (held_.training && !held_.optimized[rank]) {
      row_.push_back({Op::kOptimizer, 0, 0, 0});
    }
  }

  // What stands between two cells, of which the second starts at `start`.
  void fill_gap(uint32_t rank, uint32_t start, bool last) {
    arrivals_.place(start, &row_);
    row_.insert(row_.end(), sends_.begin(), sends_.end());
    sends_.clear();
    for (const uint16_t stage : released_) {
      row_.push_back({Op::kReduceGrad, 0, stage, 0});
    }
    released_.clear();
    const auto& reductions = reductions_[rank];
    while (next_reduction_ < reductions.size() &&
           (last || reductions[next_reduction_].time <= start)) {
      const Reduction next = reductions[next_reduction_++];
      row_.push_back({Op::kTieReduce, 0, next.stage, next.tie});
      release_tie(rank, next.tie);
      for (const uint16_t stage : released_) {
        row_.push_back({Op::kReduceGrad, 0, stage, 0});
      }
      released_.clear();
    }
  }

  void place_action(uint32_t rank, Action action) {
    row_.push_back(action);
    if (!held_.messages && action.op == Op::kForward) {
      send_output(action);
    } else if (!held_.messages && gives_input_gradient(action.op)) {
      send_gradient(action);
    }
    if (gives_weight_gradient(action.op)) {
      --weights_left_[action.stage];
      release(action.stage);
    } else if (action.op == Op::kTieReduce) {
      release_tie(rank, action.microbatch);
    }
  }

  void send_output(Action action) {
    const auto send = [&](size_t target, uint8_t flags) {
      if (crosses(action.stage, target) &&
          timing_.output(target, action.microbatch) != Timing::kAbsent) {
        sends_.push_back(
            {Op::kSendForward, flags, action.stage, action.microbatch});
      }
    };
    if (action.stage + 1u < schedule_.stages) {
      send(action.stage + 1u, 0);
    }
    for (const uint8_t route : timing_.routes_from(action.stage)) {
      send(schedule_.routes[route].target, static_cast<uint8_t>(route + 1));
    }
  }

  void send_gradient(Action action) {
    const auto send = [&](size_t target, uint8_t flags) {
      if (crosses(action.stage, target) &&
          timing_.gradient(target, action.microbatch) != Timing::kAbsent) {
        sends_.push_back(
            {Op::kSendBackward, flags, action.stage, action.microbatch});
      }
    };
    if (action.stage > 0) {
      send(action.stage - 1u, 0);
    }
    for (const uint8_t route : timing_.routes_to(action.stage)) {
      send(schedule_.routes[route].source, static_cast<uint8_t>(route + 1));
    }
  }

  void release_tie(uint32_t rank, uint32_t tie) {
    for (const uint16_t stage : schedule_.ties[tie]) {
      if (schedule_.placement[stage] == rank) {
        --ties_left_[stage];
        release(stage);
      }
    }
  }

  // A stage's gradients can be reduced when they are all there and summed.
  void release(uint16_t stage) {
    if (weights_left_[stage] == 0 && ties_left_[stage] == 0 &&
        held_.weights[stage] && !held_.reduced[stage]) {
      released_.push_back(stage);
    }
  }

  const Schedule& schedule_;
  const Inventory& held_;
  const Timing timing_;
  Arrivals arrivals_;
  std::vector<uint32_t> weights_left_;
  std::vector<uint32_t> ties_left_;
  std::vector<std::vector<Reduction>> reductions_;
  // Of the rank that is placed; kept to spare allocations.
  size_t next_reduction_ = 0;
  std::vector<Action> sends_;
  std::vector<uint16_t> released_;
  std::vector<Action> row_;
};

} // namespace

bool Schedule::complete() const {
  // What is only computation is run on paper even if nothing has to be added.
  return lowered() && Inventory(*this).complete(*this);
}

Schedule Schedule::lower() const {
  return complete() ? *this : Lowering(*this, Inventory(*this)).run();
}

} // namespace torch_sm3::pipeline
