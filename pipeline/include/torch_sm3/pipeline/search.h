// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>
#include <torch_sm3/pipeline/planner.h>

#include <cstdint>
#include <string>
#include <vector>

/// \file
/// The kind `auto`: plans everything that could do, and takes the fastest that
/// fits.

namespace torch_sm3::pipeline {

/// A plan that the search looked at.
struct Candidate {
  /// In words, for example `interleaved chunks=2 group_size=4`.
  std::string plan;
  double makespan = 0;
  /// Of the rank that needs most.
  double peak_bytes = 0;
  /// Why it could not be taken; empty if it could.
  std::string refused;
  bool chosen = false;
};

/// What the search took.
struct Choice {
  Schedule schedule;
  /// The costs given, cut or put together for the schedule's stages.
  Costs costs;
  /// Everything it looked at, in the order in which it did.
  std::vector<Candidate> alternatives;
};

/// Searches kinds, chunks, group sizes, warm-ups, and lists made by a greedy
/// scheduler of F, I and W under the memory limit.
///
/// The fastest by `simulate` that fits is taken; of equally fast ones that with
/// the least memory on the rank that needs most, then the first. Options that
/// are given (chunks, group size, warm-up) are kept to. Without chunks, costs
/// of one entry are those of the whole share of one rank, of which a stage of v
/// chunks is 1/v; costs of p * n stages are put together for the chunks that
/// divide n; `split` counts the same shares or stages. The schedule's kind is
/// that of its plan, or `auto` for a list and for a V with more room.
///
/// \param options kind `auto` and sizes
/// \throws std::invalid_argument naming the argument that is wrong
/// \throws ScheduleError if nothing fits, with the smallest limit that would
TORCH_SM3_API Choice search(const PlanOptions& options);

} // namespace torch_sm3::pipeline
