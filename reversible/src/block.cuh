// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Sums, scans and maxima of the threads of a block, for CUDA kernels and,
/// after tests/cpp/cuda_on_host.h, for the host. Blocks have whole warps.

#include <scalar_math.h>

#include <cstdint>

namespace torch_sm3::reversible {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kMaxWarps = 32;

/// The sum of the values of all threads before this one.
///
/// \param shared room for kMaxWarps numbers; free again on return
/// \param total  becomes the sum of all
template <class T>
__device__ inline T sum_before(T value, T* shared, T* total) {
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned warp = threadIdx.x / kWarp;
  T sum = value;
  for (unsigned step = 1; step < kWarp; step *= 2) {
    const T other = __shfl_up_sync(kAllLanes, sum, step);
    sum += lane >= step ? other : T(0);
  }
  if (lane == kWarp - 1) {
    shared[warp] = sum;
  }
  __syncthreads();
  T before = sum - value;
  T all = 0;
  for (unsigned w = 0; w < blockDim.x / kWarp; ++w) {
    before += w < warp ? shared[w] : T(0);
    all += shared[w];
  }
  *total = all;
  __syncthreads();
  return before;
}

/// The sum of all threads' values; right in the first thread.
/// \param shared see sum_before; free again after the next __syncthreads
template <class T>
__device__ inline T block_sum(T value, T* shared) {
  for (unsigned step = kWarp / 2; step > 0; step /= 2) {
    value += __shfl_down_sync(kAllLanes, value, step);
  }
  if (threadIdx.x % kWarp == 0) {
    shared[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  T sum = 0;
  if (threadIdx.x == 0) {
    for (unsigned w = 0; w < blockDim.x / kWarp; ++w) {
      sum += shared[w];
    }
  }
  return sum;
}

/// The largest of all threads' values; see block_sum.
template <class T>
__device__ inline T block_max(T value, T* shared) {
  for (unsigned step = kWarp / 2; step > 0; step /= 2) {
    const T other = __shfl_down_sync(kAllLanes, value, step);
    value = other > value ? other : value;
  }
  if (threadIdx.x % kWarp == 0) {
    shared[threadIdx.x / kWarp] = value;
  }
  __syncthreads();
  T largest = shared[0];
  if (threadIdx.x == 0) {
    for (unsigned w = 1; w < blockDim.x / kWarp; ++w) {
      largest = shared[w] > largest ? shared[w] : largest;
    }
  }
  return largest;
}

} // namespace torch_sm3::reversible
