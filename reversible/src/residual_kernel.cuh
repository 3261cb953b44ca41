// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Body of the CUDA kernel of the residual sums. Compiled by nvcc through
/// residual_cuda.cu and, for tests, by the host compiler after
/// tests/cpp/cuda_on_host.h.

#include <residual_math.h>

#include <cstdint>

namespace torch_sm3::reversible {

inline constexpr int kResidualThreads = 256;
/// Elements of a thread; their loads are in flight together.
inline constexpr int kResidualPerThread = 4;

/// A block computes kResidualThreads * kResidualPerThread elements.
template <bool kSubtract, class A, class V>
__global__ void __launch_bounds__(kResidualThreads) residual_kernel(
    const A* __restrict__ acc,
    const V* __restrict__ value,
    A* __restrict__ out,
    int64_t count) {
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * blockDim.x * kResidualPerThread +
      threadIdx.x;
  for (int k = 0; k < kResidualPerThread; ++k) {
    const int64_t i = first + static_cast<int64_t>(k) * blockDim.x;
    if (i < count) {
      out[i] = residual<kSubtract>(acc[i], value[i]);
    }
  }
}

} // namespace torch_sm3::reversible
