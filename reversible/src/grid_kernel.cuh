// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Bodies of the CUDA kernels of the grid operators. Compiled by nvcc through
/// grid_cuda.cu and, for tests, by the host compiler after
/// tests/cpp/cuda_on_host.h.

#include <grid_math.h>
#include <block.cuh>

#include <cstdint>

namespace torch_sm3::reversible {

inline constexpr int kGridThreads = 256;
/// Elements of a thread; their loads are in flight together.
inline constexpr int kGridPerThread = 4;

/// A block computes kGridThreads * kGridPerThread elements, as do all below.
template <class C>
__global__ void __launch_bounds__(kGridThreads) quantize_kernel(
    const C* __restrict__ value,
    C* __restrict__ out,
    int64_t count,
    Grid<C> grid) {
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * blockDim.x * kGridPerThread +
      threadIdx.x;
  for (int k = 0; k < kGridPerThread; ++k) {
    const int64_t i = first + static_cast<int64_t>(k) * blockDim.x;
    if (i < count) {
      out[i] = quantize(value[i], grid);
    }
  }
}

// atomicMax is there for these types only.
__device__ inline void raise(float* amax, int32_t bits) {
  atomicMax(reinterpret_cast<int*>(amax), static_cast<int>(bits));
}
__device__ inline void raise(double* amax, int64_t bits) {
  atomicMax(
      reinterpret_cast<unsigned long long*>(amax),
      static_cast<unsigned long long>(bits));
}

/// \param amax zero at first; the bits of its numbers are ordered as they are
template <bool kSubtract, class C, class V>
__global__ void __launch_bounds__(kGridThreads) grid_kernel(
    const C* __restrict__ acc,
    const V* __restrict__ value,
    C* __restrict__ out,
    C* __restrict__ amax,
    int64_t count,
    Grid<C> grid) {
  using Bits = typename GridTraits<C>::Bits;
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * blockDim.x * kGridPerThread +
      threadIdx.x;
  Bits largest = 0;
  for (int k = 0; k < kGridPerThread; ++k) {
    const int64_t i = first + static_cast<int64_t>(k) * blockDim.x;
    if (i < count) {
      const C y = grid_sum<kSubtract>(acc[i], value[i], grid);
      out[i] = y;
      const Bits magnitude = magnitude_bits(y);
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  if (!kSubtract) {
    __shared__ Bits of_warp[kMaxWarps];
    largest = block_max(largest, of_warp);
    if (threadIdx.x == 0) {
      raise(amax, bits_of(magnitude_from<C>(largest)));
    }
  }
}

} // namespace torch_sm3::reversible
