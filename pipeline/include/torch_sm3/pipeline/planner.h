// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>
#include <torch_sm3/pipeline/costs.h>
#include <torch_sm3/pipeline/schedule.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

/// What to plan. p, v and m are ranks, chunks and microbatches.
struct PlanOptions {
  /// `none`, `gpipe`, `forward`, `1f1b`, `interleaved`, `looped_bfs`, `zb_h1`,
  /// `zb_h2`, `zbv`, `v_half`, `v_min`, `dualpipe_v` or `auto`.
  std::string kind;
  int64_t ranks = 1;
  int64_t microbatches = 1;
  /// Stages per rank; 0 is the usual number of the kind.
  int64_t chunks = 0;
  /// Microbatches per group of `interleaved`; 0 chooses.
  int64_t group_size = 0;
  /// Of the actions; uniform ones if not given.
  std::optional<Costs> costs = std::nullopt;
  /// Time of a message one way, in the unit of the costs.
  double link_cost = 0;
  /// Bytes of each rank; one entry stands for all, none for no limit.
  std::vector<double> memory_limit = {};
  /// Sends of a link that may be under way, whose bytes count against the
  /// limit; as many as those of `RunnerOptions`. Fewer take less.
  int64_t max_pending = 2;
  /// First stage of the decoder; 0 if there is none.
  int64_t split = 0;
  /// How the encoder's output reaches the decoder's stages: handed on by each
  /// (`chain`) or by routes of its own (`direct`).
  std::string via = "chain";
  /// Rounds of warm-up of `1f1b`; negative chooses by the link cost.
  int64_t warmup = -1;
};

/// Names of the kinds that `plan` knows.
TORCH_SM3_API const std::vector<std::string>& kinds();

/// Plans a compute-only schedule; `Schedule::lower` adds the messages.
///
/// Every stage runs its forwards, its input gradients and its weight gradients
/// in microbatch order. A memory limit lowers the warm-up of `1f1b` rank by
/// rank; other kinds fit or do not. A forced `group_size` is verified.
///
/// \param options kind and sizes
/// \throws std::invalid_argument naming the argument that is wrong
/// \throws ScheduleError if the limit is too small, naming the smallest that
///     is not, or if a forced group cannot run, with the grid
TORCH_SM3_API Schedule plan(const PlanOptions& options);

/// Plans all but the rows: kind, sizes, placement, routes, and an empty row for
/// each rank. Kind `auto` has to plan them all to know.
///
/// \param options kind and sizes
/// \throws std::invalid_argument naming the argument that is wrong
TORCH_SM3_API Schedule outline(const PlanOptions& options);

/// Plans the row of one rank alone; equal to that row of `plan`. Takes memory
/// for that row and a few counters per rank, unless a memory limit or a forced
/// group asks for a look at the whole.
///
/// \param options kind and sizes
/// \param rank    the rank
/// \throws std::invalid_argument naming the argument that is wrong
/// \throws ScheduleError as `plan`
TORCH_SM3_API std::vector<Action>
plan_rank(const PlanOptions& options, int64_t rank);

/// Says what a forced group size loses against the planner's own, with the
/// bubbles of both; empty if nothing.
///
/// \param options kind and sizes
/// \throws as `plan`
TORCH_SM3_API std::string advice(const PlanOptions& options);

/// Cuts layers into contiguous stages such that the largest is as small as can
/// be; exact. Of cuts that are equally good, one whose largest stage in bytes
/// is as small as can be.
///
/// \param costs  of each layer
/// \param stages number of stages, at most the number of layers
/// \param memory bytes of each layer; empty if they do not matter
/// \param limit  bytes that a stage may hold; 0 for no limit
/// \return the first layer of each stage
/// \throws std::invalid_argument naming the argument that is wrong
/// \throws ScheduleError if no cut keeps the limit, naming the smallest limit
///     that can be kept
TORCH_SM3_API std::vector<int64_t> partition(
    const std::vector<double>& costs,
    int64_t stages,
    const std::vector<double>& memory = {},
    double limit = 0);

} // namespace torch_sm3::pipeline
