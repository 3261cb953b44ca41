// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/costs.h>
#include <torch_sm3/pipeline/schedule.h>

#include <cstddef>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

/// Largest of all costs: their sums over any schedule, times jitter and over
/// speeds, are finite.
inline constexpr double kMostCost = 1e60;
inline constexpr double kLeastDivisor = 1e-60;

/// Checks that costs have the sizes that a schedule needs, and are neither
/// negative nor larger than `kMostCost`.
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

/// Checks limits of memory.
///
/// \param op     who asks, for the message
/// \param limits bytes of each rank, one for all, or none
/// \param ranks  number of ranks
/// \throws std::invalid_argument naming the argument that is wrong
void check_limits(
    const char* op,
    const std::vector<double>& limits,
    size_t ranks);

/// Returns the limit of a rank; infinity if there is none.
///
/// \param limits bytes of each rank, one for all, or none
/// \param rank   the rank
double limit_of(const std::vector<double>& limits, size_t rank);

/// Writes a number that reads back as it was, a whole one without exponent.
///
/// \param value the number
std::string short_number(double value);

/// Checks a link model.
///
/// \param op    who asks, for the message
/// \param links the model
/// \throws std::invalid_argument naming the argument that is wrong
void check_links(const char* op, LinkModel links);

} // namespace torch_sm3::pipeline
