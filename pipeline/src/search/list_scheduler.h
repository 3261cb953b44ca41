// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/costs.h>
#include <torch_sm3/pipeline/schedule.h>

#include <cstdint>
#include <vector>

namespace torch_sm3::pipeline {

/// How the greedy scheduler decides.
struct ListPolicy {
  /// Activations that each rank may hold, in the unit of `weights`.
  std::vector<double> budgets;
  /// What an activation of each stage takes.
  std::vector<double> weights;
  /// What an input gradient of each stage gives back of it; negative where it
  /// keeps more until the weight gradient.
  std::vector<double> released;
  /// Whether a forward of a later chunk goes before an input gradient.
  bool forwards_first = false;
  /// Whether each chunk gets a share of its rank's budget by how long its
  /// activations live, instead of all but one for each later chunk.
  bool shares = false;
  /// Place of each F, then I, then W in the rows of another plan, by stage and
  /// microbatch; empty if there is none to follow.
  std::vector<uint32_t> order;
};

/// Schedules F, I and W of a pipeline: a rank that becomes free takes what is
/// ready, gradients first, forwards of later chunks before those of earlier
/// ones, and weight gradients when there is nothing else or no room. A chunk
/// leaves room for one activation of each later chunk of its rank, so that the
/// oldest microbatch always comes through.
///
/// With an order to follow, a rank takes of what is ready what comes first
/// there, its forwards in that order only; so whatever the plan's own budgets
/// are, the action that is earliest in the plan can always run.
///
/// \param shape  stages, placement, routes and microbatches; its rows are
/// unused
/// \param costs  of its stages and links
/// \param policy how to decide; a budget holds at least one activation of each
///     chunk and what one input gradient keeps more
/// \return the rows
std::vector<std::vector<Action>> schedule_list(
    const Schedule& shape,
    const Costs& costs,
    const ListPolicy& policy);

/// Returns the most that an input gradient of one of these stages keeps more.
double more_of_one_input(
    const ListPolicy& policy,
    const std::vector<uint32_t>& stages);

} // namespace torch_sm3::pipeline
