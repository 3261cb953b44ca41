// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Momentum of any type for the CUDA kernels of SM3, int8 in blocks with a
/// scale among it.

#include <sm3_part_kernel.cuh>
#include <sm3_tile_kernel.cuh>

namespace torch_sm3 {

/// Largest sizes of the blocks of int8 momentum in each warp's row.
struct SM3Sizes {
  unsigned largest[kSM3Warps][kSM3Span];
};

// The scale of a span's first element. A span lies in one block or, where the
// last size is smaller than that, is made of whole ones.
template <class C>
TORCH_SM3_DEVICE int64_t
sm3_first_scale(const SM3DeviceTensor<C>& t, const SM3RowPart& part) {
  const int64_t element = part.start + part.column;
  const int64_t blocks = (t.last + kSM3Block - 1) / kSM3Block;
  return element / t.last * blocks + element % t.last / kSM3Block;
}

template <class C>
TORCH_SM3_DEVICE int sm3_block_of(const SM3DeviceTensor<C>& t, int column) {
  return t.last < kSM3Block ? column / static_cast<int>(t.last) : 0;
}

TORCH_SM3_DEVICE void sm3_load_blocks(
    const SM3DeviceTensor<float>& t,
    const int64_t* numbers,
    const SM3RowPart& part,
    float* m) {
  const auto* const in = static_cast<const int8_t*>(t.momentum.data);
  const float* const scales = t.scales + sm3_first_scale(t, part);
  int64_t places[kSM3PerLane] = {};
  sm3_find_places(t.momentum, numbers, part, places);
  sm3_for_part(part, [&](int i) {
    m[i] = static_cast<float>(in[places[i]]) *
           scales[sm3_block_of(t, part.column_of(i))];
  });
}

// What counts for the scale: |m| unless it is not finite.
TORCH_SM3_DEVICE float sm3_size(float m) {
  return is_finite(m) ? (m < 0 ? -m : m) : 0.0f;
}

TORCH_SM3_DEVICE void sm3_find_sizes(
    const SM3DeviceTensor<float>& t,
    const SM3RowPart& part,
    const float* m,
    unsigned* sizes) {
  if (t.last >= kSM3Block) {
    float largest = 0;
    TORCH_SM3_UNROLL
    for (int i = 0; i < kSM3PerLane; ++i) {
      largest = sm3_largest(largest, part.has(i) ? sm3_size(m[i]) : 0.0f);
    }
    largest = sm3_largest_of_warp(largest);
    if (part.lane == 0) {
      sizes[0] = sm3_bits(largest);
    }
    __syncwarp();
    return;
  }
  for (int i = part.lane; i < kSM3Span; i += kSM3Warp) {
    sizes[i] = 0;
  }
  __syncwarp();
  TORCH_SM3_UNROLL
  for (int i = 0; i < kSM3PerLane; ++i) {
    if (part.has(i)) {
      unsigned* const size = sizes + sm3_block_of(t, part.column_of(i));
      atomicMax(size, sm3_bits(sm3_size(m[i])));
    }
  }
  __syncwarp();
}

TORCH_SM3_DEVICE void sm3_store_blocks(
    const SM3DeviceTensor<float>& t,
    const int64_t* numbers,
    const SM3RowPart& part,
    const float* m,
    const uint32_t* random,
    unsigned* sizes) {
  sm3_find_sizes(t, part, m, sizes);
  auto* const out = static_cast<int8_t*>(t.momentum.data);
  float* const scales = t.scales + sm3_first_scale(t, part);
  const int last = static_cast<int>(sm3_least<int64_t>(t.last, kSM3Block));
  int64_t places[kSM3PerLane] = {};
  sm3_find_places(t.momentum, numbers, part, places);
  sm3_for_part(part, [&](int i) {
    const int column = part.column_of(i);
    const int block = sm3_block_of(t, column);
    const float scale = sm3_from_bits<float>(sizes[block]) / 127.0f;
    const float chance = t.stochastic ? sm3_momentum_random(random[i]) : -1.0f;
    out[places[i]] = sm3_quantize(m[i], scale, chance);
    if (column % last == 0) {
      scales[block] = scale;
    }
  });
  // The warp's next row clears what is read here.
  __syncwarp();
}

template <class C>
TORCH_SM3_DEVICE void sm3_load_momentum(
    const SM3DeviceTensor<C>& t,
    const int64_t* numbers,
    const SM3RowPart& part,
    C* m) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (t.scales != nullptr) {
      sm3_load_blocks(t, numbers, part, m);
      return;
    }
  }
  sm3_gather(t.momentum, numbers, part, m);
}

template <class C>
TORCH_SM3_DEVICE void sm3_store_momentum(
    const SM3DeviceTensor<C>& t,
    const int64_t* numbers,
    const SM3RowPart& part,
    const C* m,
    const uint32_t* random,
    unsigned* sizes) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (t.scales != nullptr) {
      sm3_store_blocks(t, numbers, part, m, random, sizes);
      return;
    }
  }
  sm3_scatter(m, t.momentum, numbers, part);
}

} // namespace torch_sm3
