// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// CUDA kernels of Adasum: weighted sums of the leaves, and the float16 format
/// of the wire.

#include "adasum_device.cuh"
#include "adasum_kernel.h"
#include "adasum_scales.h"
#include "adasum_tables.h"

namespace torch_sm3::distributed::cuda {

/// Threads of a block of `combine` and `rescale`, and elements that a thread
/// has in registers.
inline constexpr int kCombineThreads = 256;
inline constexpr int kCombineEach = 8;
/// The same for `encode`: a block holds a whole tile.
inline constexpr int kEncodeThreads = 1024;
inline constexpr int kEncodeEach = static_cast<int>(kTile) / kEncodeThreads;

/// Sums of the elements first + k * blockDim of one tile: from +0 in ascending
/// order of the leaves, each product rounded, then added.
template <class T, int kEach>
__device__ __forceinline__ void sum_leaves(
    const LeafTable& leaves,
    const double* coefficients,
    int64_t tile,
    int64_t start,
    int64_t first,
    int64_t size,
    double* sums) {
  TORCH_SM3_UNROLL_ALL
  for (int k = 0; k < kEach; ++k) {
    sums[k] = 0.0;
  }
  for (int64_t i = 0; i < leaves.p; ++i) {
    const T* row = static_cast<const T*>(leaves.rows[i]) + start;
    const double c = coefficients[i];
    const double scale =
        leaves.scales == nullptr ? 1.0 : leaves.scales[tile * leaves.p + i];
    T x[kEach] = {};
    TORCH_SM3_UNROLL_ALL
    for (int k = 0; k < kEach; ++k) {
      const int64_t e = first + int64_t{k} * blockDim.x;
      if (e < size) {
        x[k] = row[e];
      }
    }
    TORCH_SM3_UNROLL_ALL
    for (int k = 0; k < kEach; ++k) {
      sums[k] += c * (scale * to_double(x[k]));
    }
  }
}

/// True if one leaf is passed on bit for bit.
__device__ __forceinline__ bool
keeps_bits(const LeafTable& leaves, const double* c, int64_t tile) {
  const double scale = leaves.scales == nullptr ? 1.0 : leaves.scales[tile];
  return leaves.p == 1 && c[0] * scale == 1.0;
}

/// Block t: the elements of tile t. `out` may be one of the rows.
///
/// \param coefficients [L, p]
template <class T, class O>
__global__ void __launch_bounds__(kCombineThreads) combine(
    LeafTable leaves,
    TileTable tiles,
    const double* coefficients,
    O* out) {
  const int64_t tile = blockIdx.x;
  const double* c = coefficients + tiles.layer[tile] * leaves.p;
  const int64_t start = tiles.start[tile];
  const int64_t size = tiles.size[tile];
  const bool same = sizeof(T) == sizeof(O) && keeps_bits(leaves, c, tile);
  for (int64_t first = threadIdx.x; first < size;
       first += int64_t{kCombineThreads} * kCombineEach) {
    double sums[kCombineEach];
    sum_leaves<T, kCombineEach>(leaves, c, tile, start, first, size, sums);
    TORCH_SM3_UNROLL_ALL
    for (int k = 0; k < kCombineEach; ++k) {
      const int64_t e = first + int64_t{k} * kCombineThreads;
      if (e < size) {
        O rounded;
        round_to(sums[k], &rounded);
        if (same) {
          memcpy(
              &rounded,
              static_cast<const T*>(leaves.rows[0]) + start + e,
              sizeof(rounded));
        }
        out[start + e] = rounded;
      }
    }
  }
}

/// Block t: tile t times its power of two, rounded once.
///
/// \param scales [T], or null: all 1
template <class T, class O>
__global__ void __launch_bounds__(kCombineThreads)
    rescale(const T* in, TileTable tiles, const double* scales, O* out) {
  const int64_t tile = blockIdx.x;
  const double scale = scales == nullptr ? 1.0 : scales[tile];
  const int64_t start = tiles.start[tile];
  const int64_t size = tiles.size[tile];
  for (int64_t first = threadIdx.x; first < size;
       first += int64_t{kCombineThreads} * kCombineEach) {
    T x[kCombineEach] = {};
    TORCH_SM3_UNROLL_ALL
    for (int k = 0; k < kCombineEach; ++k) {
      const int64_t e = first + int64_t{k} * kCombineThreads;
      if (e < size) {
        x[k] = in[start + e];
      }
    }
    TORCH_SM3_UNROLL_ALL
    for (int k = 0; k < kCombineEach; ++k) {
      const int64_t e = first + int64_t{k} * kCombineThreads;
      if (e < size) {
        round_to(scale * to_double(x[k]), out + start + e);
      }
    }
  }
}

/// The size of a finite number, 0 for any other.
TORCH_SM3_INLINE double finite_size(double x) {
  const double size = fabs(x);
  return size <= 0x1.fffffffffffffp+1023 ? size : 0.0;
}

/// Block t: tile t as float16 times a power of two. The tile is the weighted
/// sum of the leaves, or, where `coefficients` is null, the only leaf itself.
///
/// \param scales [T], is written
template <class T>
__global__ void __launch_bounds__(kEncodeThreads) encode(
    LeafTable leaves,
    TileTable tiles,
    const double* coefficients,
    Half* out,
    double* scales) {
  const int64_t tile = blockIdx.x;
  const int64_t start = tiles.start[tile];
  const int64_t size = tiles.size[tile];
  const int64_t first = threadIdx.x;
  double values[kEncodeEach];
  if (coefficients != nullptr) {
    const double* c = coefficients + tiles.layer[tile] * leaves.p;
    sum_leaves<T, kEncodeEach>(leaves, c, tile, start, first, size, values);
  } else {
    const T* row = static_cast<const T*>(leaves.rows[0]) + start;
    TORCH_SM3_UNROLL_ALL
    for (int k = 0; k < kEncodeEach; ++k) {
      const int64_t e = first + int64_t{k} * kEncodeThreads;
      values[k] = e < size ? to_double(row[e]) : 0.0;
    }
  }
  double largest = 0.0;
  TORCH_SM3_UNROLL_ALL
  for (int k = 0; k < kEncodeEach; ++k) {
    const double magnitude = finite_size(values[k]);
    largest = magnitude > largest ? magnitude : largest;
  }
  const int32_t shift =
      float16_shift(largest_of_block<kEncodeThreads>(largest));
  const double factor = power_of_two(-shift);
  TORCH_SM3_UNROLL_ALL
  for (int k = 0; k < kEncodeEach; ++k) {
    const int64_t e = first + int64_t{k} * kEncodeThreads;
    if (e < size) {
      round_to(factor * values[k], out + start + e);
    }
  }
  if (threadIdx.x == 0) {
    scales[tile] = power_of_two(shift);
  }
}

} // namespace torch_sm3::distributed::cuda
