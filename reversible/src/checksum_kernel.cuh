// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Body of the CUDA kernel of the checksum. Compiled by nvcc through
/// checksum_cuda.cu and, for tests, by the host compiler after
/// tests/cpp/cuda_on_host.h.

#include <checksum_math.h>
#include <block.cuh>

#include <cstdint>

namespace torch_sm3::reversible {

inline constexpr int kChecksumThreads = 256;
/// More blocks than that only queue up for the one sum.
inline constexpr unsigned kChecksumBlocks = 2048;

/// \param sum zero at first
template <class U>
__global__ void __launch_bounds__(kChecksumThreads) checksum_kernel(
    const U* __restrict__ data,
    int64_t count,
    unsigned long long* __restrict__ sum) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  unsigned long long part = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < count;
       i += step) {
    part += checksum_part(data[i], static_cast<uint64_t>(i));
  }
  __shared__ unsigned long long of_warp[kMaxWarps];
  part = block_sum(part, of_warp);
  if (threadIdx.x == 0) {
    atomicAdd(sum, part);
  }
}

} // namespace torch_sm3::reversible
