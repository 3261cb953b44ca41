// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The algorithms that combine one bucket, over any transport and device.

#include "adasum_plan.h"
#include "adasum_transport.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace torch_sm3::distributed {

/// Phases whose time is kept apart.
enum class Phase : int8_t {
  wait, ///< for the queue
  exchange,
  dots,
  coefficients,
  combine,
  return_, ///< of the result to all ranks
};
inline constexpr int kPhases = 6;

/// What metrics are made from.
struct Outcome {
  at::Tensor gram;         ///< float64 [L, p, p]; undefined for vhdd
  at::Tensor coefficients; ///< float64 [L, p]; undefined for vhdd
  at::Tensor report;       ///< float64 [L, 2]: kappa, cancelled nodes
  /// vhdd: float64 [levels, L], cosines of this rank's block at each level.
  at::Tensor cosines;
  std::array<double, kPhases> seconds{};
  int64_t bytes_sent = 0;
  int64_t messages_sent = 0;
};

/// Buffers that stay allocated between buckets, below a cap.
class Scratch {
 public:
  /// The `index`-th buffer, grown to `bytes`; uint8, on the device of `like`.
  at::Tensor take(size_t index, int64_t bytes, const at::Tensor& like);
  void release() {
    buffers_.clear();
  }

 private:
  std::vector<at::Tensor> buffers_;
};

/// One bucket on its way.
struct Job {
  const Plan& plan;
  at::Tensor leaf; ///< this rank's leaf: 1-D, contiguous
  at::Tensor
      result; ///< 1-D, contiguous; `leaf` itself, or apart and of any dtype
  Transport& transport;
  Transport* shards; ///< the ranks that hold the other shards, or null
  Scratch& scratch;
  uint64_t call;    ///< names the call; the tags of its messages derive from it
  std::string what; ///< operation and bucket, for errors
  Outcome* outcome; ///< or null
};

/// Chooses for `Algorithm::automatic`, else checks; ValueError if impossible.
///
/// Depends on what is equal on all ranks only.
///
/// \param ranks            number of ranks
/// \param local_world_size ranks per machine, 0 if unknown
/// \param alike            all ranks compute the same bits
/// \param bytes            of the bucket
Algorithm choose_algorithm(
    const Plan& plan,
    int ranks,
    int local_world_size,
    bool alike,
    int64_t bytes,
    const char* op);

/// Replaces `job.result` on every rank; blocks on the CPU.
void run_algorithm(Algorithm algorithm, const Job& job);

} // namespace torch_sm3::distributed
