// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Part of one element in a checksum, once for host and device.

#include <scalar_math.h>

namespace torch_sm3::reversible {

/// Depends on the element's bits and on its place; the parts are added modulo
/// 2^64, in any order. The mixing is the last step of splitmix64.
TORCH_SM3_INLINE uint64_t checksum_part(uint64_t bits, uint64_t index) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  uint64_t z = bits + kGolden * (index + 1);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

} // namespace torch_sm3::reversible
