// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/costs.h>
#include <torch_sm3/pipeline/schedule.h>

namespace torch_sm3::pipeline {

/// Checks that costs have the sizes that a schedule needs, and are finite and
/// not negative.
///
/// \param op       who asks, for the message
/// \param schedule the schedule
/// \param costs    its costs
/// \throws std::invalid_argument naming the argument that is wrong
void check_costs(const char* op, const Schedule& schedule, const Costs& costs);

/// Tells whether anything takes room, so that a limit of memory means anything.
///
/// \param costs the costs
bool has_bytes(const Costs& costs);

/// Checks a link model.
///
/// \param op    who asks, for the message
/// \param links the model
/// \throws std::invalid_argument naming the argument that is wrong
void check_links(const char* op, LinkModel links);

} // namespace torch_sm3::pipeline
