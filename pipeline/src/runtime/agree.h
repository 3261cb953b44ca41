// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <runtime/ties.h>

#include <torch_sm3/pipeline/runtime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

// What all ranks know of each other.
struct Agreement {
  Schedule schedule; // with its messages
  // Members of each tied weight, in the order in which the schedule numbers
  // them.
  std::vector<std::vector<Member>> ties;
};

// Checks the arguments of a runner on all ranks together. A ValueError is the
// same on all ranks.
Agreement agree(
    Transport* transport,
    int64_t rank,
    int64_t ranks,
    const Schedule& schedule,
    const std::vector<Stage>& stages,
    const RunnerOptions& options);

// Checks the arguments of this rank.
void check(
    int64_t rank,
    int64_t ranks,
    const Schedule& schedule,
    const std::vector<Stage>& stages,
    const RunnerOptions& options);

// A deterministic run adds contributions in microbatch order.
void check_backward_order(const Schedule& schedule);

// Delays of links, as text.
std::string delays(const RunnerOptions& options);

// The schedule with the routes and ties of the stages, as far as it can still
// be given any.
Schedule completed(
    const Schedule& schedule,
    std::vector<Route> routes,
    const Members& members);

// Tied weights in the order in which a schedule numbers them; those of a single
// stage, which no schedule knows, come last.
std::vector<std::vector<Member>>
numbered(Members members, const std::vector<std::vector<uint16_t>>& known);

// Adds the reductions that the row of a rank leaves out, at its end.
void add_collectives(Agreement* known, int64_t rank);

} // namespace torch_sm3::pipeline
