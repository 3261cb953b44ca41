// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/simulator.h>
#include <verifier/program.h>

namespace torch_sm3::pipeline {

/// Simulates a schedule that has all its messages and collectives and is known
/// to be right but for its order: what the planner has made itself need not be
/// looked through again.
///
/// \param program       the schedule
/// \param costs         of its actions and links
/// \param links         how messages are posted and matched
/// \param with_timeline whether to keep the spans of all actions
/// \return all but the peaks
/// \throws ScheduleError if it cannot run to its end
Simulation run_program(
    const Program& program,
    const Costs& costs,
    const LinkModel& links,
    bool with_timeline);

/// Counts the most bytes in use on each rank; they follow from the order alone.
///
/// \param program a schedule whose counts are right
/// \param costs   bytes
/// \param links   when what was sent is given back
std::vector<double> peak_bytes_of(
    const Program& program,
    const Costs& costs,
    const LinkModel& links);

} // namespace torch_sm3::pipeline
