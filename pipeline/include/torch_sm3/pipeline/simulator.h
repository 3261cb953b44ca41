// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>
#include <torch_sm3/pipeline/costs.h>
#include <torch_sm3/pipeline/schedule.h>

#include <cstdint>
#include <vector>

namespace torch_sm3::pipeline {

/// When an action ran.
struct Span {
  double start = 0;
  double end = 0;
};

/// What `simulate` found. Times are in the unit of the costs.
struct Simulation {
  double makespan = 0;
  std::vector<double> busy; ///< of each rank: time in actions
  std::vector<double> idle; ///< of each rank: makespan - busy
  /// Of each rank: first start to last end, less busy.
  std::vector<double> own_idle;
  std::vector<double> peak_bytes; ///< of each rank
  /// The largest of each rank's work plus the shortest way to and from it.
  double lower_bound = 0;
  /// Of each rank and action of its (lowered) row, if asked for.
  std::vector<std::vector<Span>> timeline;
};

/// Runs a schedule on paper, in time linear in the number of actions.
///
/// A compute-only schedule is lowered first. Latency counts from the SEND.
///
/// \param schedule      the schedule
/// \param costs         of its actions and links
/// \param links         how messages are posted and matched
/// \param with_timeline whether to keep the spans of all actions
/// \throws ScheduleError if it cannot run to its end
TORCH_SM3_API Simulation simulate(
    const Schedule& schedule,
    const Costs& costs = {},
    const LinkModel& links = {},
    bool with_timeline = false);

} // namespace torch_sm3::pipeline
