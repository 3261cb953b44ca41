// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>
#include <torch_sm3/pipeline/schedule.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

/// What to plan. p, v and m are ranks, chunks and microbatches.
struct PlanOptions {
  /// `none` (p = 1: forward and backward of each microbatch in turn), `gpipe`
  /// (all forwards, then all backwards), `1f1b` (rank r warms up
  /// min(m, p-1-r) forwards, alternates, drains) or `forward` (forwards only,
  /// chunk after chunk).
  std::string kind;
  int64_t ranks = 1;
  int64_t microbatches = 1;
  /// Stages per rank; more than one only with `forward`.
  int64_t chunks = 1;
};

/// Names of the kinds that `plan` knows.
TORCH_SM3_API const std::vector<std::string>& kinds();

/// Plans a compute-only schedule; `Schedule::lower` adds the messages.
///
/// Every stage runs its forwards and its backwards in microbatch order.
///
/// \param options kind and sizes
/// \throws std::invalid_argument naming the argument that is wrong
TORCH_SM3_API Schedule plan(const PlanOptions& options);

} // namespace torch_sm3::pipeline
