// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// CUDA kernels of Adasum: inner products. They add in the order that
/// adasum_kernel.h lays down, so that their sums have the bits of the CPU
/// kernels: a block is a tile, a warp a strip, a thread a lane.

#include "adasum_device.cuh"
#include "adasum_kernel.h"
#include "adasum_tables.h"

#include <cstdint>

namespace torch_sm3::distributed::cuda {

inline constexpr int kStripsPerTile = static_cast<int>(kTile / kStrip);
/// Threads of a block of `dots`.
inline constexpr int kDotsThreads = kStripsPerTile * static_cast<int>(kLanes);

/// One lane of one pair, added in A; see adasum_kernel.h.
template <class A>
struct Lane;

template <>
struct Lane<double> {
  double sum = 0.0;

  // A product of narrower elements is exact, so that fusing it with the sum
  // changes no bit.
  template <class T>
  __device__ void add(double a, double b) {
#if defined(__CUDA_ARCH__)
    if (sizeof(T) < sizeof(double)) {
      sum = __fma_rn(a, b, sum);
      return;
    }
#endif
    sum += a * b;
  }
  __device__ double total() const {
    return sum;
  }
};

template <>
struct Lane<float> {
  float sum = 0.0f, lost = 0.0f;

  template <class T>
  __device__ void add(float a, float b) {
    const float product = a * b;
    const float next = sum + product;
    const float added = next - sum;
    lost += (sum - (next - added)) + (product - added);
    sum = next;
  }
  __device__ double total() const {
    return static_cast<double>(sum) + static_cast<double>(lost);
  }
};

/// Element `e` of a row as A. Only float64 is scaled before its products, see
/// `AdasumKernels::dots`.
template <class T, class A>
__device__ __forceinline__ A element_of(const T* row, int64_t e, double scale) {
  if constexpr (sizeof(A) == sizeof(float)) {
    return to_float(row[e]);
  } else if constexpr (sizeof(T) == sizeof(double)) {
    return scale * row[e];
  } else {
    return to_double(row[e]);
  }
}

/// Adds the 32 lanes of a warp as a binary tree; the first one has the sum.
__device__ __forceinline__ double add_lanes(double sum) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(~0u, sum, half);
  }
  return sum;
}

/// A block of pairs: rows i.. with columns j..
struct PairBlock {
  int64_t i, j;
};

/// Block `index` of the pairs of p rows, kEdge on each side: those on the
/// diagonal, or those above it in the order (0, 1), (0, 2), ..., (1, 2), ...
template <int kEdge, bool kTriangle>
__device__ __forceinline__ PairBlock pair_block(int64_t p, int64_t index) {
  if (kTriangle) {
    return {index * kEdge, index * kEdge};
  }
  const int64_t blocks = (p + kEdge - 1) / kEdge;
  int64_t i = 0;
  int64_t rest = index;
  for (; rest >= blocks - 1 - i; ++i) {
    rest -= blocks - 1 - i;
  }
  return {i * kEdge, (i + 1 + rest) * kEdge};
}

/// Adds the strips of a tile in order and writes the pairs of a block to where
/// they stand in the packed Gram matrix `out`.
///
/// \param strips [kStripsPerTile, kPairs]
/// \param scales p, or null
template <class T, int kEdge, bool kTriangle>
__device__ __forceinline__ void add_strips(
    const double* strips,
    const PairBlock& block,
    const double* scales,
    int64_t p,
    double* out) {
  constexpr int kPairs = kTriangle ? kEdge * (kEdge + 1) / 2 : kEdge * kEdge;
  for (int pair = threadIdx.x; pair < kPairs; pair += kDotsThreads) {
    int r = 0;
    int c = pair;
    for (; c >= kEdge - (kTriangle ? r : 0); ++r) {
      c -= kEdge - (kTriangle ? r : 0);
    }
    const int64_t i = block.i + r;
    const int64_t j = block.j + c + (kTriangle ? r : 0);
    if (i < p && j < p) {
      double total = 0.0;
      for (int s = 0; s < kStripsPerTile; ++s) {
        total += strips[s * kPairs + pair];
      }
      if (sizeof(T) < sizeof(double) && scales != nullptr) {
        total = total * scales[i] * scales[j];
      }
      out[pair_index(p, i, j)] = total;
    }
  }
}

/// Block (t, k): the pairs of block k over tile t, every element read once.
///
/// Rows behind the last one are that one again, and their sums are dropped.
///
/// \param flags layers that are computed, or null: all
template <class T, class A, int kEdge, bool kTriangle>
__global__ void __launch_bounds__(kDotsThreads) dots(
    LeafTable leaves,
    TileTable tiles,
    const bool* flags,
    double* partial) {
  constexpr int kPairs = kTriangle ? kEdge * (kEdge + 1) / 2 : kEdge * kEdge;
  // Loads on their way at a time: few rows leave registers for more.
  [[maybe_unused]] constexpr int kUnroll = kEdge == 2 ? 4 : 2;
  __shared__ double strips[kStripsPerTile][kPairs];
  const int64_t tile = blockIdx.x;
  if (flags != nullptr && !flags[tiles.layer[tile]]) {
    return;
  }
  const int64_t p = leaves.p;
  const PairBlock block = pair_block<kEdge, kTriangle>(p, blockIdx.y);
  const double* scales =
      leaves.scales == nullptr ? nullptr : leaves.scales + tile * p;
  const T* x[kEdge];
  const T* y[kEdge];
  double x_scale[kEdge];
  double y_scale[kEdge];
  TORCH_SM3_UNROLL_ALL
  for (int k = 0; k < kEdge; ++k) {
    const int64_t i = block.i + k < p ? block.i + k : p - 1;
    const int64_t j = block.j + k < p ? block.j + k : p - 1;
    x[k] = static_cast<const T*>(leaves.rows[i]) + tiles.start[tile];
    y[k] = static_cast<const T*>(leaves.rows[j]) + tiles.start[tile];
    x_scale[k] = scales == nullptr ? 1.0 : scales[i];
    y_scale[k] = scales == nullptr ? 1.0 : scales[j];
  }
  const int strip = static_cast<int>(threadIdx.x / kLanes);
  const int lane = static_cast<int>(threadIdx.x % kLanes);
  const int64_t size = tiles.size[tile];
  const int64_t end = (strip + 1) * kStrip < size ? (strip + 1) * kStrip : size;
  Lane<A> sums[kPairs];
  TORCH_SM3_UNROLL_SOME
  for (int64_t e = strip * kStrip + lane; e < end; e += kLanes) {
    A a[kEdge];
    A b[kEdge];
    TORCH_SM3_UNROLL_ALL
    for (int k = 0; k < kEdge; ++k) {
      a[k] = element_of<T, A>(x[k], e, x_scale[k]);
    }
    TORCH_SM3_UNROLL_ALL
    for (int k = 0; k < kEdge; ++k) {
      b[k] = kTriangle ? a[k] : element_of<T, A>(y[k], e, y_scale[k]);
    }
    int pair = 0;
    TORCH_SM3_UNROLL_ALL
    for (int r = 0; r < kEdge; ++r) {
      TORCH_SM3_UNROLL_ALL
      for (int c = kTriangle ? r : 0; c < kEdge; ++c, ++pair) {
        sums[pair].template add<T>(a[r], b[c]);
      }
    }
  }
  TORCH_SM3_UNROLL_ALL
  for (int pair = 0; pair < kPairs; ++pair) {
    const double sum = add_lanes(sums[pair].total());
    if (lane == 0) {
      strips[strip][pair] = sum;
    }
  }
  __syncthreads();
  add_strips<T, kEdge, kTriangle>(
      &strips[0][0], block, scales, p, partial + tile * pair_count(p));
}

/// One thread per entry of the Gram matrices [L, p, p] of a run of layers.
__global__ void add_tiles(
    const double* partial,
    int64_t layers,
    int64_t p,
    TileTable tiles,
    double* gram) {
  const int64_t index =
      static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= layers * p * p) {
    return;
  }
  const int64_t layer = index / (p * p);
  const int64_t row = index / p % p;
  const int64_t column = index % p;
  const int64_t pair =
      row < column ? pair_index(p, row, column) : pair_index(p, column, row);
  // Many loads on their way before the first sum waits for one.
  constexpr int kBatch = 32;
  double sum = 0.0;
  const int64_t end = tiles.first[layer + 1];
  for (int64_t t = tiles.first[layer]; t < end; t += kBatch) {
    double batch[kBatch];
    TORCH_SM3_UNROLL_ALL
    for (int k = 0; k < kBatch; ++k) {
      batch[k] = t + k < end ? partial[(t + k) * pair_count(p) + pair] : 0.0;
    }
    TORCH_SM3_UNROLL_ALL
    for (int k = 0; k < kBatch; ++k) {
      sum += batch[k];
    }
  }
  gram[index] = sum;
}

} // namespace torch_sm3::distributed::cuda
