// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What the ranks compare before and after they exchange data.

#include "adasum_plan.h"
#include "adasum_transport.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_sm3::distributed {

/// What must be equal on all ranks before data moves: 64 bytes.
struct Header {
  int64_t sequence; ///< number of the call
  int64_t elements; ///< real numbers of the bucket
  uint64_t sizes;   ///< hash of the layer sizes and of the memory order
  uint64_t lists; ///< hash of leaf weights and of the layers that get the mean
  double scale;
  int64_t scratch_bytes;
  int32_t layers;
  int32_t node_size;
  int8_t kind; ///< 0: a bucket, 1: a small tensor of each rank
  int8_t dtype, result_dtype;
  int8_t mode, algorithm;
  uint8_t inner : 1, accumulate : 1, wire : 2, wide : 1, mean : 1, check : 2;
  int8_t device; ///< may differ
  int8_t broken; ///< the ranks of the shard group disagree
};
static_assert(sizeof(Header) == 64);

/// Swaps a 1-D uint8 tensor on the CPU with all ranks; [p, n] on the CPU.
at::Tensor swap_bytes(
    Transport& transport,
    const at::Tensor& mine,
    int tag,
    const std::string& what);

/// Options and layers of a plan as a header; the rest is zero.
Header header_of(const Plan& plan);

/// RuntimeError on all ranks that names ranks and what differs, unless all
/// headers are equal.
///
/// \param shards the ranks with the other shards, or null: there only options
///               and the number of layers must be equal
/// \return whether all ranks combine on devices of one type
bool check_headers(
    Transport& ranks,
    Transport* shards,
    Header mine,
    const std::string& what);

/// RuntimeError on all ranks that names ranks and layers, unless all hold the
/// same bits.
///
/// \param result 1-D, the layers of the plan
void check_hashes(
    Transport& ranks,
    const Plan& plan,
    const at::Tensor& result,
    const std::string& what);

/// What the ranks found out about each other.
struct Fingerprint {
  /// All ranks compute the same bits on the CPU and on other devices.
  bool alike_on_cpu = true, alike_elsewhere = true;
  int local_world_size = 0; ///< ranks per machine, if it is equal on all
};

/// Compares build, instruction set and ranks per machine; collective.
///
/// \param local_world_size of this rank, 0 if unknown
Fingerprint compare_fingerprints(
    Transport& ranks,
    int local_world_size,
    const std::string& what);

} // namespace torch_sm3::distributed
