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

/// What metrics are made from. Where runs of ranks are combined first
/// (two_level, nodes of equal size with the mean inside), the leaves are those
/// of the runs.
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

/// Memory that stays allocated between buckets; its users keep to the cap.
class Scratch {
 public:
  /// The memory, grown to `bytes`; uint8, on the device of `like`.
  at::Tensor take(int64_t bytes, const at::Tensor& like);
  void release() {
    memory_ = at::Tensor();
  }
  int64_t bytes() const {
    return memory_.defined() ? memory_.numel() : 0;
  }

 private:
  at::Tensor memory_;
};

/// One bucket on its way.
struct Job {
  const Plan& plan;
  at::Tensor leaf; ///< this rank's leaf: 1-D, contiguous
  at::Tensor
      result; ///< 1-D, contiguous; `leaf` itself, or apart and of any dtype
  Transport& transport;
  /// The ranks that hold the other shards of the same layers, or null.
  Transport* shards;
  Scratch& scratch;
  uint64_t call;    ///< names the call; the tags of its messages derive from it
  std::string what; ///< operation and bucket, for errors
  Outcome* outcome; ///< or null
  int local_world_size = 0; ///< ranks per machine, 0: unknown
};

/// Ranks per run of two_level: the nodes' if they are combined by Adasum
/// inside, else those of a machine, else the largest power of two up to the
/// root of `ranks`; 1 if there is none that divides.
int ranks_per_run(const Rule& rule, int ranks, int local_world_size);

/// Whether all nodes have equally many ranks and the mean inside, so that they
/// are combined before the others.
bool has_node_means(const Rule& rule, int ranks);

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
