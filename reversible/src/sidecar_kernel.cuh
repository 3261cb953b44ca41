// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Bodies of the CUDA kernels of the sidecar, a block for each tile. Compiled
/// by nvcc through sidecar_cuda.cu and, for tests, by the host compiler after
/// tests/cpp/cuda_on_host.h.

#include <sidecar_kernel.h>
#include <block.cuh>

#include <cstdint>

namespace torch_sm3::reversible {

inline constexpr int kSidecarThreads = 256;

/// Consecutive elements of a thread, where their order counts.
inline constexpr int64_t kSidecarPerThread = kSidecarTile / kSidecarThreads;

/// Two numbers of at most kSidecarTile each, summed as one.
TORCH_SM3_INLINE uint32_t escapes_and_wide(uint32_t escapes, uint32_t wide) {
  return wide << 16 | escapes;
}

/// Calls `body(i)` for each escape among this thread's consecutive elements of
/// a tile, in order.
template <class Body>
__device__ inline void
for_each_escape(const Sidecar& s, const uint8_t* codes, Body body) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kSidecarTile +
                        static_cast<int64_t>(threadIdx.x) * kSidecarPerThread;
  for (int64_t i = first; i < first + kSidecarPerThread && i < s.count; ++i) {
    const unsigned code =
        codes[i / kSidecarCodes] >> (2 * (i % kSidecarCodes)) & 3u;
    if (code == kSidecarEscape) {
      body(i);
    }
  }
}

/// Writes a tile's codes and, into `offsets`, its counts.
template <class U>
__global__ void __launch_bounds__(kSidecarThreads)
    sidecar_codes_kernel(SidecarEncode s) {
  const U* __restrict__ x = static_cast<const U*>(s.x);
  const U* __restrict__ estimate = static_cast<const U*>(s.estimate);
  uint32_t escapes = 0;
  uint32_t wide = 0;
  const int64_t tile = blockIdx.x;
  const int64_t groups = kSidecarTile / kSidecarCodes;
  for (int64_t group = threadIdx.x; group < groups; group += kSidecarThreads) {
    const int64_t first = tile * kSidecarTile + group * kSidecarCodes;
    unsigned byte = 0;
    for (int64_t k = 0; k < kSidecarCodes && first + k < s.count; ++k) {
      const U difference =
          sidecar_difference(x[first + k], estimate[first + k]);
      const auto code = static_cast<unsigned>(sidecar_code(difference));
      byte |= code << (2 * k);
      escapes += code == kSidecarEscape ? 1u : 0u;
      wide += sidecar_is_wide(difference) ? 1u : 0u;
    }
    if (first < s.count) {
      s.codes[first / kSidecarCodes] = static_cast<uint8_t>(byte);
    }
  }
  __shared__ uint32_t of_warp[kMaxWarps];
  const uint32_t counts = block_sum(escapes_and_wide(escapes, wide), of_warp);
  if (threadIdx.x == 0) {
    s.offsets[2 * tile] = counts & 0xffffu;
    s.offsets[2 * tile + 1] = counts >> 16;
  }
}

/// Turns the counts of all tiles into the places where each begins; one block.
/// \param used becomes how many there are of each
inline __global__ void __launch_bounds__(kSidecarThreads)
    sidecar_offsets_kernel(int64_t* offsets, int64_t tiles, int64_t* used) {
  const int64_t share = (tiles + kSidecarThreads - 1) / kSidecarThreads;
  const int64_t begin = static_cast<int64_t>(threadIdx.x) * share;
  const int64_t end = begin + share < tiles ? begin + share : tiles;
  __shared__ int64_t of_warp[kMaxWarps];
  for (int which = 0; which < 2; ++which) {
    int64_t mine = 0;
    for (int64_t tile = begin; tile < end; ++tile) {
      mine += offsets[2 * tile + which];
    }
    int64_t total = 0;
    int64_t place = sum_before(mine, of_warp, &total);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t count = offsets[2 * tile + which];
      offsets[2 * tile + which] = place;
      place += count;
    }
    if (threadIdx.x == 0) {
      used[which] = total;
    }
  }
}

/// Writes a tile's escapes, as far as there is room.
template <class U>
__global__ void __launch_bounds__(kSidecarThreads)
    sidecar_escapes_kernel(SidecarEncode s) {
  const U* __restrict__ x = static_cast<const U*>(s.x);
  const U* __restrict__ estimate = static_cast<const U*>(s.estimate);
  U* wide_numbers = static_cast<U*>(s.wide);
  uint32_t counts = 0;
  for_each_escape(s, s.codes, [&](int64_t i) {
    const bool wide = sidecar_is_wide(sidecar_difference(x[i], estimate[i]));
    counts += escapes_and_wide(1u, wide ? 1u : 0u);
  });
  __shared__ uint32_t of_warp[kMaxWarps];
  uint32_t total = 0;
  const uint32_t before = sum_before(counts, of_warp, &total);
  const size_t tile = blockIdx.x;
  int64_t byte = s.offsets[2 * tile] + (before & 0xffffu);
  int64_t number = s.offsets[2 * tile + 1] + (before >> 16);
  for_each_escape(s, s.codes, [&](int64_t i) {
    const U difference = sidecar_difference(x[i], estimate[i]);
    const bool wide = sidecar_is_wide(difference);
    if (byte < s.byte_capacity) {
      s.bytes[byte] = wide ? kSidecarWide : static_cast<int8_t>(difference);
    }
    if (wide && number < s.wide_capacity) {
      wide_numbers[number] = difference;
    }
    byte += 1;
    number += wide ? 1 : 0;
  });
}

// A byte that is not there reads as no difference: a captured graph decodes
// before its overflow is looked at, and must not read beyond the end.
__device__ inline int8_t byte_or_zero(const SidecarDecode& s, int64_t byte) {
  return byte >= 0 && byte < s.byte_capacity ? s.bytes[byte] : int8_t{0};
}

/// Rebuilds a tile's elements.
template <class U>
__global__ void __launch_bounds__(kSidecarThreads)
    sidecar_decode_kernel(SidecarDecode s) {
  const U* __restrict__ estimate = static_cast<const U*>(s.estimate);
  const U* __restrict__ wide_numbers = static_cast<const U*>(s.wide);
  U* x = static_cast<U*>(s.x);
  const int64_t tile = blockIdx.x;
  for (int64_t k = threadIdx.x; k < kSidecarTile; k += kSidecarThreads) {
    const int64_t i = tile * kSidecarTile + k;
    if (i < s.count) {
      const unsigned code =
          s.codes[i / kSidecarCodes] >> (2 * (i % kSidecarCodes)) & 3u;
      x[i] = sidecar_element(estimate[i], sidecar_small<U>(code));
    }
  }
  // The escapes next, each by the thread that knows how many come before it.
  __shared__ uint32_t of_warp[kMaxWarps];
  uint32_t escapes = 0;
  uint32_t total = 0;
  for_each_escape(s, s.codes, [&](int64_t) { ++escapes; });
  const int64_t first =
      s.offsets[2 * tile] + sum_before(escapes, of_warp, &total);
  uint32_t wide = 0;
  int64_t byte = first;
  for_each_escape(s, s.codes, [&](int64_t) {
    wide += byte_or_zero(s, byte++) == kSidecarWide ? 1u : 0u;
  });
  int64_t number = s.offsets[2 * tile + 1] + sum_before(wide, of_warp, &total);
  byte = first;
  for_each_escape(s, s.codes, [&](int64_t i) {
    const int8_t value = byte_or_zero(s, byte++);
    U difference = sidecar_from_byte<U>(value);
    if (value == kSidecarWide) {
      const bool is_there = number >= 0 && number < s.wide_capacity;
      difference = is_there ? wide_numbers[number] : U(0);
      ++number;
    }
    x[i] = sidecar_element(estimate[i], difference);
  });
}

} // namespace torch_sm3::reversible
