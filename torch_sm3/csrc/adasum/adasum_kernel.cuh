// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// CUDA kernels of Adasum. They add in the order that adasum_kernel.h lays
/// down, so that their sums have the bits of the CPU kernels: a block is a
/// tile, a warp a strip, a thread a lane.

#include "adasum_kernel.h"
#include "scalar_math.h"

#include <cstdint>

namespace torch_sm3::distributed::cuda {

inline constexpr int kStripsPerTile = static_cast<int>(kTile / kStrip);
inline constexpr int kThreads =
    kStripsPerTile * static_cast<int>(kLanes); // of `dots` and `combine`

/// Tiles as arrays on the device.
struct TileTable {
  const int64_t* start; // T: first element
  const int64_t* size;  // T
  const int64_t* layer; // T
  const int64_t* first; // L + 1: first tile of each layer
};

/// Block (t, k): dot product k of tile t, pairs counted (0,0), (0,1), ...
template <class T>
__global__ void
dots(const T* stack, int64_t p, int64_t n, TileTable tiles, double* partial) {
  __shared__ double strips[kStripsPerTile];
  int64_t i = 0;
  int64_t j = blockIdx.y;
  for (; j >= p - i; ++i) {
    j -= p - i;
  }
  j += i;
  const int64_t tile = blockIdx.x;
  const int strip = static_cast<int>(threadIdx.x / kLanes);
  const int lane = static_cast<int>(threadIdx.x % kLanes);
  const int64_t size = tiles.size[tile];
  const int64_t end = (strip + 1) * kStrip < size ? (strip + 1) * kStrip : size;
  const T* a = stack + i * n + tiles.start[tile];
  const T* b = stack + j * n + tiles.start[tile];
  double sum = 0.0;
  for (int64_t e = strip * kStrip + lane; e < end; e += kLanes) {
    sum += to_double(a[e]) * to_double(b[e]);
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    sum += __shfl_down_sync(~0u, sum, half);
  }
  if (lane == 0) {
    strips[strip] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0.0;
    for (int s = 0; s < kStripsPerTile; ++s) {
      total += strips[s];
    }
    partial[tile * pair_count(p) + blockIdx.y] = total;
  }
}

/// One thread per entry of the Gram matrices [L, p, p].
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
  const int64_t i = row < column ? row : column;
  const int64_t j = row < column ? column : row;
  const int64_t pair = i * p - i * (i - 1) / 2 + (j - i);
  double sum = 0.0;
  for (int64_t t = tiles.first[layer]; t < tiles.first[layer + 1]; ++t) {
    sum += partial[t * pair_count(p) + pair];
  }
  gram[index] = sum;
}

/// Block t: the elements of tile t.
template <class T>
__global__ void combine(
    const T* stack,
    int64_t p,
    int64_t n,
    const double* c,
    TileTable tiles,
    T* out) {
  const int64_t tile = blockIdx.x;
  const double* own = c + tiles.layer[tile] * p;
  const bool copies = p == 1 && own[0] == 1.0;
  const int64_t start = tiles.start[tile];
  for (int64_t e = threadIdx.x; e < tiles.size[tile]; e += blockDim.x) {
    const T* column = stack + start + e;
    double sum = 0.0;
    for (int64_t i = 0; i < p; ++i) {
      sum += own[i] * to_double(column[i * n]);
    }
    T rounded;
    round_to(sum, &rounded);
    out[start + e] = copies ? *column : rounded;
  }
}

} // namespace torch_sm3::distributed::cuda
