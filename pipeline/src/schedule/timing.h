// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/schedule.h>

#include <algorithm>
#include <vector>

/// \file
/// When the cells of a schedule run on paper, where messages take no time. What
/// the F of a pair makes is there before the other half runs. Flat arrays only:
/// schedules have tens of millions of actions.

namespace torch_sm3::pipeline {

/// Time of an action on paper.
///
/// With B as long as F, RECVs of interleaved plans whose groups are longer than
/// p come so late that a sender with one pending send waits for them: at p = 8
/// up to 2 % of a step if B takes 2 F, 12 % if it takes 5 F. Three is the least
/// with which nobody waits in the plans of several chunks for p in {2, 3, 4, 5,
/// 8} from B = F / 5 to 5 F; their peaks are the same or lower. With one chunk
/// nobody waits at one, and at more 1F1B with a long warm-up does. Links that
/// take long can still make a sender of such an interleaved plan wait, up to 7
/// % of a step at a latency of F; two pending sends, the runner's default, cure
/// nearly all of it. So they do where W takes 4 F and 2 (F + I), at which a
/// sender of zb_h2 with one pending send waits for RECVs that stand behind a W,
/// up to an eighth of a step.
///
/// \param schedule the schedule
/// \param op       the operation
inline uint32_t units(const Schedule& schedule, Op op) {
  return op == Op::kBackward && schedule.stages > schedule.ranks ? 3 : 1;
}

class Timing {
 public:
  /// A result that no action of the schedule makes.
  static constexpr uint32_t kAbsent = 0;

  /// Runs a schedule.
  ///
  /// \param schedule what to run; must outlive this
  /// \throws ScheduleError if it cannot run to its end, with the actions at
  ///     which the ranks wait for each other, or has an action twice
  explicit Timing(const Schedule& schedule);

  /// When the output of a stage is there, or kAbsent.
  uint32_t output(size_t stage, size_t microbatch) const {
    return ends_[stage * microbatches_ + microbatch];
  }

  /// When the gradient of a stage's inputs is there, or kAbsent.
  uint32_t gradient(size_t stage, size_t microbatch) const {
    return ends_[(schedule_.stages + stage) * microbatches_ + microbatch];
  }

  /// When each action of a rank starts; a message has the time of its gap.
  const std::vector<uint32_t>& starts(size_t rank) const {
    return starts_[rank];
  }

  /// When the last weight gradient of a stage is there; 0 if there is none.
  uint32_t weights_end(size_t stage) const {
    return weights_end_[stage];
  }

  /// How many weight gradients a stage has.
  uint32_t weights(size_t stage) const {
    return weights_[stage];
  }

  /// Numbers of the routes that start at a stage.
  const std::vector<uint8_t>& routes_from(size_t stage) const {
    return routes_.empty() ? none_ : routes_[stage];
  }

  /// Numbers of the routes that end at a stage.
  const std::vector<uint8_t>& routes_to(size_t stage) const {
    return routes_.empty() ? none_ : routes_[schedule_.stages + stage];
  }

 private:
  static constexpr uint32_t kPending = 0xffffffffu;
  static constexpr size_t kNothing = ~size_t{0};

  void index_routes();
  void mark_actions();
  void expect(size_t slot, Action action);
  void run(uint32_t rank);
  bool need(uint32_t rank, size_t slot, uint32_t* start);
  bool ready(uint32_t rank, Action action, uint32_t* start);
  void wake(uint32_t stage, size_t slot);
  void finish(Action action, uint32_t end);
  void check_finished() const;

  size_t forward_slot(size_t stage, size_t microbatch) const {
    return stage * microbatches_ + microbatch;
  }
  size_t gradient_slot(size_t stage, size_t microbatch) const {
    return (schedule_.stages + stage) * microbatches_ + microbatch;
  }

  const Schedule& schedule_;
  // One more than the largest microbatch that is computed.
  size_t microbatches_ = 0;
  // Forwards, then input gradients, each [stages * microbatches_].
  std::vector<uint32_t> ends_;
  std::vector<std::vector<uint32_t>> starts_;
  std::vector<uint32_t> weights_end_;
  std::vector<uint32_t> weights_;
  // From each stage, then to each stage; empty without routes.
  std::vector<std::vector<uint8_t>> routes_;
  std::vector<uint8_t> none_;
  std::vector<uint32_t> clocks_;
  // The slot for which a rank waits.
  std::vector<size_t> waits_;
  std::vector<uint32_t> runnable_;
};

/// Number of actions of the cell that starts at `index`: two for a pair.
///
/// \param row   a row
/// \param index first action of a cell
inline size_t cell_size(const std::vector<Action>& row, size_t index) {
  const Action action = row[index];
  return is_compute(action.op) && (action.flags & kPaired) != 0 &&
                 index + 1 < row.size()
             ? 2
             : 1;
}

} // namespace torch_sm3::pipeline
