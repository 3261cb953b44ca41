// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What the ranks compare before data moves.

#include "adasum_plan.h"
#include "adasum_transport.h"

#include <cstdint>
#include <string>

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

} // namespace torch_sm3::distributed
