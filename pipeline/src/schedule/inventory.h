// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/schedule.h>

#include <vector>

namespace torch_sm3::pipeline {

/// What a schedule holds, so that lowering adds what it lacks.
struct Inventory {
  /// Looks at every action once.
  ///
  /// \param schedule the schedule
  explicit Inventory(const Schedule& schedule);

  /// Tells whether the schedule has all that `lower` would add.
  ///
  /// \param schedule the schedule that was looked at
  bool complete(const Schedule& schedule) const;

  bool messages = false;
  bool training = false;       ///< some weight gradient
  std::vector<bool> computed;  ///< any F, then any B or I, by stage
  std::vector<bool> weights;   ///< any weight gradient, by stage
  std::vector<bool> reduced;   ///< REDUCE_GRAD, by stage
  std::vector<bool> tied;      ///< TIE_REDUCE, by tie
  std::vector<bool> optimized; ///< OPTIM, by rank

 private:
  void note(const Schedule& schedule, uint32_t rank, Action action);
  bool needs_messages(const Schedule& schedule) const;
};

} // namespace torch_sm3::pipeline
