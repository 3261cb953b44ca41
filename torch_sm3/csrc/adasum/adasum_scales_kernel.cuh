// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// CUDA kernels of Adasum's second pass, and the hash.

#include "adasum_device.cuh"
#include "adasum_scales.h"
#include "adasum_tables.h"

namespace torch_sm3::distributed::cuda {

/// Threads of a block of `exponents` and `hash`.
inline constexpr int kScalesThreads = 256;

/// Block (t, i): exponent of the largest element of row i of tile t, [T, p].
///
/// \param flags layers that are looked at, or null: all
template <class T>
__global__ void __launch_bounds__(kScalesThreads) exponents(
    LeafTable leaves,
    TileTable tiles,
    const bool* flags,
    int32_t* out) {
  const int64_t tile = blockIdx.x;
  const int64_t i = blockIdx.y;
  int32_t* place = out + tile * leaves.p + i;
  if (flags != nullptr && !flags[tiles.layer[tile]]) {
    if (threadIdx.x == 0) {
      *place = kNoExponent;
    }
    return;
  }
  const T* row = static_cast<const T*>(leaves.rows[i]) + tiles.start[tile];
  // Anything that is not finite shows as infinity.
  double largest = 0.0;
  for (int64_t e = threadIdx.x; e < tiles.size[tile]; e += kScalesThreads) {
    const double size = fabs(to_double(row[e]));
    const bool finite = size <= 0x1.fffffffffffffp+1023;
    const double shown = finite ? size : INFINITY;
    largest = shown > largest ? shown : largest;
  }
  largest = largest_of_block<kScalesThreads>(largest);
  if (threadIdx.x == 0) {
    const double scale =
        leaves.scales == nullptr ? 1.0 : leaves.scales[tile * leaves.p + i];
    *place = scaled_exponent(largest, largest < INFINITY, scale);
  }
}

/// One thread per leaf of each layer of a run: its shift, [layers, p].
__global__ void shifts(
    const int32_t* exponents,
    TileTable tiles,
    int64_t layers,
    int64_t p,
    int32_t* out) {
  const int64_t index =
      static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index < layers * p) {
    const int64_t first = tiles.first[index / p];
    const int64_t count = tiles.first[index / p + 1] - first;
    out[index] =
        shift_of(largest_exponent(exponents + first * p + index % p, count, p));
  }
}

/// One thread per leaf of each tile of a run: its scale in the second pass.
///
/// \param before [T, p], or null: all 1
/// \param shifts [L, p]
__global__ void second_scales(
    const double* before,
    const int32_t* shifts,
    TileTable tiles,
    int64_t p,
    double* out) {
  const int64_t index =
      static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index < tiles.tiles * p) {
    const int64_t layer = tiles.layer[index / p];
    const double given = before == nullptr ? 1.0 : before[index];
    out[index] = given * power_of_two(-shifts[layer * p + index % p]);
  }
}

/// One thread per layer: whether it takes a second pass.
__global__ void second_pass(
    const double* gram,
    int64_t layers,
    int64_t p,
    bool float32,
    bool* flags) {
  const int64_t layer =
      static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (layer < layers) {
    flags[layer] = needs_second_pass(gram + layer * p * p, p, float32);
  }
}

/// Word `index` of a buffer, with zeros behind its end.
__device__ __forceinline__ uint64_t
word_at(const unsigned char* data, int64_t bytes, int64_t index) {
  const unsigned char* from = data + index * 8;
  const int64_t left = bytes - index * 8;
  if (left >= 8 && reinterpret_cast<uintptr_t>(from) % 8 == 0) {
    return *reinterpret_cast<const uint64_t*>(from);
  }
  uint64_t word = 0;
  for (int64_t k = 0; k < 8 && k < left; ++k) {
    word |= static_cast<uint64_t>(from[k]) << (8 * k);
  }
  return word;
}

/// Adds the hashes of all words to `sum`, in any order: a sum modulo 2^64. The
/// last word may be an empty one, and the length counts as one more.
__global__ void __launch_bounds__(kScalesThreads)
    hash(const unsigned char* data, int64_t bytes, unsigned long long* sum) {
  const int64_t words = bytes / 8 + 1;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kScalesThreads;
  const int64_t own =
      static_cast<int64_t>(blockIdx.x) * kScalesThreads + threadIdx.x;
  uint64_t part = own == 0 ? hash_word(static_cast<uint64_t>(bytes), -1) : 0;
  for (int64_t word = own; word < words; word += stride) {
    part += hash_word(word_at(data, bytes, word), word);
  }
  for (int mask = 16; mask > 0; mask /= 2) {
    part += __shfl_xor_sync(~0u, part, mask);
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(sum, static_cast<unsigned long long>(part));
  }
}

} // namespace torch_sm3::distributed::cuda
