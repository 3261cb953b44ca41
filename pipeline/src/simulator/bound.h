// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <simulator/clocks.h>

namespace torch_sm3::pipeline {

/// No order of the same actions ends earlier: the largest of each rank's work
/// plus the shortest way to its first action and from its last.
///
/// \param program what was run
/// \param costs   its costs
/// \param ranks   work of each rank
double lower_bound(
    const Program& program,
    const Costs& costs,
    const std::vector<Clocks::Rank>& ranks);

} // namespace torch_sm3::pipeline
