// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Powers of two that keep numbers in range, and a hash: once for host and
/// device.

#include "scalar_math.h"

#include <cstdint>

namespace torch_sm3::distributed {

/// Exponent of a tile without a largest element: all zero, or not finite.
inline constexpr int32_t kNoExponent = INT32_MIN;
/// Exponent that a tile's largest element has in float16: in [2^14, 2^15).
inline constexpr int32_t kFloat16Exponent = 15;

/// Exponent e with |x| in [2^(e-1), 2^e); kNoExponent for zero, and for what
/// the floating-point environment reads as zero.
TORCH_SM3_INLINE int32_t exponent_of(double x) {
  if (x == 0.0) {
    return kNoExponent;
  }
  // A subnormal is made normal first.
  const double scaled = x * 0x1p54;
  const bool tiny = fabs(x) < 0x1p-1022;
  const double normal = tiny ? scaled : x;
  uint64_t bits;
  memcpy(&bits, &normal, sizeof(bits));
  const auto biased = static_cast<int32_t>(bits >> 52 & 0x7ffu);
  return biased - 1022 - (tiny ? 54 : 0);
}

/// 2^k for -1022 <= k <= 1023.
TORCH_SM3_INLINE double power_of_two(int32_t k) {
  const auto bits = static_cast<uint64_t>(k + 1023) << 52;
  double x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

/// Exponent of the power of two by which a float16 tile is multiplied.
///
/// Neither that power nor its inverse leaves the normal range: leaves below
/// 2^-1007 begin lower than the others.
TORCH_SM3_INLINE int32_t float16_shift(double largest) {
  const int32_t e = exponent_of(largest);
  const int32_t shift = e == kNoExponent ? 0 : e - kFloat16Exponent;
  return shift < -1022 ? -1022 : shift;
}

/// Exponent of the largest element of `scale` times a run of elements.
TORCH_SM3_INLINE int32_t
scaled_exponent(double largest, bool all_finite, double scale) {
  const int32_t e = exponent_of(largest);
  return !all_finite || e == kNoExponent ? kNoExponent
                                         : e + exponent_of(scale) - 1;
}

/// The shift of a leaf whose largest element has this exponent: 2^-shift and
/// 2^shift are normal numbers.
TORCH_SM3_INLINE int32_t shift_of(int32_t exponent) {
  return exponent == kNoExponent ? 0
         : exponent > 1022       ? 1022
         : exponent < -1022      ? -1022
                                 : exponent;
}

/// The largest of `count` exponents that stand `stride` apart.
TORCH_SM3_INLINE int32_t
largest_exponent(const int32_t* exponents, int64_t count, int64_t stride) {
  int32_t largest = kNoExponent;
  for (int64_t t = 0; t < count; ++t) {
    const int32_t one = exponents[t * stride];
    largest = one > largest ? one : largest;
  }
  return largest;
}

/// True if a square in a p x p Gram matrix left the range in which its sum can
/// be trusted to have neither overflowed nor vanished.
///
/// \param float32 products were rounded to float32
TORCH_SM3_INLINE bool
needs_second_pass(const double* gram, int64_t p, bool float32) {
  const double least = float32 ? 1e-30 : 0x1p-900;
  const double most = float32 ? 1e30 : 0x1p900;
  bool inside = true;
  for (int64_t i = 0; i < p; ++i) {
    const double square = gram[i * p + i];
    // Also false for NaN.
    inside = inside && square >= least && square <= most;
  }
  return !inside;
}

/// What word number `index` adds to a hash: a bijection of the word, so that a
/// changed bit always changes the sum (the finalizer of SplitMix64).
TORCH_SM3_INLINE uint64_t hash_word(uint64_t word, int64_t index) {
  uint64_t x = word + static_cast<uint64_t>(index) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

} // namespace torch_sm3::distributed
