// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The CUDA kernel that looks for infinity and NaN in a list of tensors.

#include <sm3_kernel.cuh>

namespace torch_sm3 {

// True if the exponent is all ones, which is told by the bits alone.
TORCH_SM3_DEVICE bool sm3_is_nonfinite(double x) {
  const unsigned long long exponent = 0x7ff0000000000000u;
  return (sm3_bits(x) & exponent) == exponent;
}
TORCH_SM3_DEVICE bool sm3_is_nonfinite(float x) {
  return (float_bits(x) & 0x7f800000u) == 0x7f800000u;
}
TORCH_SM3_DEVICE bool sm3_is_nonfinite(BFloat16 x) {
  return (x.bits & 0x7f80u) == 0x7f80u;
}
TORCH_SM3_DEVICE bool sm3_is_nonfinite(Half x) {
  return (x.bits & 0x7c00u) == 0x7c00u;
}

/// One block reads one tile. Tensors with `by_row` are read in the order of
/// their memory.
__global__ void __launch_bounds__(kSM3Threads)
    sm3_nonfinite_kernel(SM3NonfiniteLaunch l) {
  const SM3Tile tile = l.tiles[blockIdx.x];
  const SM3DeviceStrided& t = l.tensors[tile.tensor];
  const int64_t first = tile.number * kSM3NonfiniteTile;
  const int64_t end =
      sm3_least(l.counts[tile.tensor], first + kSM3NonfiniteTile);
  bool found = false;
  sm3_with_kind<double>(t.kind, [&](auto type) {
    const auto* const data = static_cast<const decltype(type)*>(t.data);
    for (int64_t i = first + threadIdx.x; i < end; i += kSM3Threads) {
      const int64_t place = t.by_row ? i : sm3_offset(t, l.numbers, i);
      found |= sm3_is_nonfinite(data[place]);
    }
  });
  if (found) {
    atomicExch(sm3_as_bits(l.found), sm3_bits(1.0f));
  }
}

} // namespace torch_sm3
