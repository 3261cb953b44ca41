// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <verifier/program.h>
#include <verifier/stops.h>

#include <string>
#include <vector>

/// \file
/// Counter-examples for people.

namespace torch_sm3::pipeline {

/// A cell to show.
struct Mark {
  uint32_t rank = 0;
  size_t at = 0;
};

/// Writes rows as a table: columns are ranks, rows are steps, marked cells
/// stand in brackets.
///
/// \param schedule the schedule
/// \param marks    what to mark, the most important first
/// \param full     all ranks and steps; otherwise three steps around each mark
std::string
grid(const Schedule& schedule, const std::vector<Mark>& marks, bool full);

/// Who waits for whom, from a run that did not come to its end.
struct Waiting {
  std::string words;
  std::vector<Mark> marks; ///< those of the cycle first
};

/// Follows what each rank waits for until the cycle closes.
///
/// \param program what was run
/// \param stops   where each rank stopped
/// \param direct  whether it was run without messages
Waiting
waiting(const Program& program, const std::vector<Stop>& stops, bool direct);

} // namespace torch_sm3::pipeline
