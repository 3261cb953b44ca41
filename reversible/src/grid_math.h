// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Arithmetic of one element on the grid of exact sums, once for host and
/// device: steps of 2^-bits, where sums round nothing while they stay below
/// 2^(p - bits), with p the bits of the significand.

#include <cast_math.h>

namespace torch_sm3::reversible {

/// A float32 or float64 as an integer of the same size.
TORCH_SM3_INLINE int32_t bits_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
TORCH_SM3_INLINE int64_t bits_of(double x) {
  int64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

/// To the nearest integer, ties to even.
TORCH_SM3_INLINE float round_even(float x) {
  return rintf(x);
}
TORCH_SM3_INLINE double round_even(double x) {
  return rint(x);
}

template <class C>
struct GridTraits;
template <>
struct GridTraits<float> {
  static constexpr int kPrecision = 24;
  using Bits = int32_t;
  static constexpr Bits kMagnitude = 0x7fffffff;
  static constexpr Bits kInfinity = 0x7f800000;
};
template <>
struct GridTraits<double> {
  static constexpr int kPrecision = 53;
  using Bits = int64_t;
  static constexpr Bits kMagnitude = 0x7fffffffffffffff;
  static constexpr Bits kInfinity = 0x7ff0000000000000;
};

/// The grid of steps 2^-bits, 0 <= bits < kPrecision.
template <class C>
struct Grid {
  C up;    ///< 2^bits
  C down;  ///< 2^-bits
  C limit; ///< from here on all numbers are on the grid
};

template <class C>
TORCH_SM3_INLINE Grid<C> make_grid(int bits) {
  const int last = GridTraits<C>::kPrecision - 1;
  const auto power = [](int n) { return static_cast<C>(uint64_t{1} << n); };
  return {power(bits), 1 / power(bits), power(last - bits)};
}

/// The nearest number of the grid, ties to even; NaN stays as it is.
///
/// Zero has no sign here: `-0 + f - f` is +0, so only a stream without -0 comes
/// back bit for bit.
template <class C>
TORCH_SM3_INLINE C quantize(C x, Grid<C> grid) {
  const C rounded = round_even(x * grid.up) * grid.down + C(0);
  const C size = x < 0 ? -x : x;
  return size < grid.limit ? rounded : x;
}

/// `acc + quantize(cast(value))` or minus.
template <bool kSubtract, class C, class V>
TORCH_SM3_INLINE C grid_sum(C acc, V value, Grid<C> grid) {
  const C f = quantize(cast_as(value, static_cast<const C*>(nullptr)), grid);
  return kSubtract ? acc - f : acc + f;
}

/// Bits of |x|. As integers they are ordered as the numbers are, and those of
/// NaN lie above those of infinity.
template <class C>
TORCH_SM3_INLINE typename GridTraits<C>::Bits magnitude_bits(C x) {
  return bits_of(x) & GridTraits<C>::kMagnitude;
}

/// The number of the largest magnitude_bits; infinity for a NaN.
template <class C>
TORCH_SM3_INLINE C magnitude_from(typename GridTraits<C>::Bits bits) {
  const auto capped =
      bits > GridTraits<C>::kInfinity ? GridTraits<C>::kInfinity : bits;
  C x;
  memcpy(&x, &capped, sizeof(x));
  return x;
}

} // namespace torch_sm3::reversible
