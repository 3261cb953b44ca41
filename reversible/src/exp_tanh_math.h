// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// exp and tanh, once for host and device, within two units in the last place.
///
/// A C library's functions differ from machine to machine and by the width of
/// the vectors that they are inlined into; these have the same bits everywhere:
/// only + - * / and integer shifts, each rounded once, and no branches.

#include <scalar_math.h>

namespace torch_sm3::reversible {

template <class C>
struct ExpTraits;
template <>
struct ExpTraits<float> {
  /// ln 2 in two parts; the first has so few bits that n times it is exact.
  static constexpr float kLog2High = 0.693359375f;
  static constexpr float kLog2Low = -2.12194440e-4f;
  /// exp is infinite above, and zero below.
  static constexpr float kHighest = 89.0f;
  static constexpr float kLowest = -104.0f;
  /// The last whose exp is a number and not infinite.
  static constexpr float kLargest = 88.0f;
  /// Added and subtracted, it rounds to an integer.
  static constexpr float kRounder = 12582912.0f;
  static constexpr float kBias = 127.0f;
};
template <>
struct ExpTraits<double> {
  static constexpr double kLog2High = 6.93145751953125e-1;
  static constexpr double kLog2Low = 1.42860682030941723212e-6;
  static constexpr double kHighest = 710.0;
  static constexpr double kLowest = -746.0;
  static constexpr double kLargest = 709.0;
  static constexpr double kRounder = 6755399441055744.0;
  static constexpr double kBias = 1023.0;
};

/// To the nearest integer, for |x| < 2^22 or 2^51.
template <class C>
TORCH_SM3_INLINE C round_small(C x) {
  return (x + ExpTraits<C>::kRounder) - ExpTraits<C>::kRounder;
}

/// 2^n for an integer n of a normal number: n + bias lies in the low bits of
/// the sum and is shifted to where the exponent is.
TORCH_SM3_INLINE float power_of_two(float n) {
  using T = ExpTraits<float>;
  return float_from_bits(float_bits(n + (T::kRounder + T::kBias)) << 23);
}
TORCH_SM3_INLINE double power_of_two(double n) {
  using T = ExpTraits<double>;
  const double sum = n + (T::kRounder + T::kBias);
  uint64_t bits;
  memcpy(&bits, &sum, sizeof(bits));
  bits <<= 52;
  double power;
  memcpy(&power, &bits, sizeof(power));
  return power;
}

/// exp(r) - 1 for |r| <= ln(2) / 2: Taylor's series, whose rest is below a
/// tenth of the last place.
TORCH_SM3_INLINE float expm1_small(float r) {
  float sum = 1.0f / 5040;
  sum = sum * r + 1.0f / 720;
  sum = sum * r + 1.0f / 120;
  sum = sum * r + 1.0f / 24;
  sum = sum * r + 1.0f / 6;
  sum = sum * r + 0.5f;
  return r + r * r * sum;
}
TORCH_SM3_INLINE double expm1_small(double r) {
  double sum = 1.0 / 6227020800;
  sum = sum * r + 1.0 / 479001600;
  sum = sum * r + 1.0 / 39916800;
  sum = sum * r + 1.0 / 3628800;
  sum = sum * r + 1.0 / 362880;
  sum = sum * r + 1.0 / 40320;
  sum = sum * r + 1.0 / 5040;
  sum = sum * r + 1.0 / 720;
  sum = sum * r + 1.0 / 120;
  sum = sum * r + 1.0 / 24;
  sum = sum * r + 1.0 / 6;
  sum = sum * r + 0.5;
  return r + r * r * sum;
}

/// x = n ln(2) + r, with |r| <= ln(2) / 2.
template <class C>
struct ExpParts {
  C n;
  C expm1_of_r;
};
template <class C>
TORCH_SM3_INLINE ExpParts<C> exp_parts(C x) {
  using T = ExpTraits<C>;
  const C n = round_small(x * C(1.4426950408889634074));
  const C r = (x - n * T::kLog2High) - n * T::kLog2Low;
  return {n, expm1_small(r)};
}

/// exp(x) of any x.
template <class C>
TORCH_SM3_INLINE C exponential(C x) {
  using T = ExpTraits<C>;
  // NaN passes both.
  x = x > T::kHighest ? T::kHighest : x;
  x = x < T::kLowest ? T::kLowest : x;
  const ExpParts<C> parts = exp_parts(x);
  // In two steps, because 2^n may be no normal number; only the last one
  // rounds.
  const C half = round_small(parts.n * C(0.5));
  return (C(1) + parts.expm1_of_r) * power_of_two(half) *
         power_of_two(parts.n - half);
}

/// (tanh(x) - x) / x^3 as a polynomial in z = x^2 for |x| <= 0.625,
/// interpolated at Chebyshev's nodes; what it lacks is far below the last place
/// of tanh.
TORCH_SM3_INLINE float tanh_polynomial(float z) {
  float sum = 0.002292744816f;
  sum = sum * z - 0.008343945516f;
  sum = sum * z + 0.02176891865f;
  sum = sum * z - 0.05395925958f;
  sum = sum * z + 0.1333330356f;
  return sum * z - 0.3333333317f;
}
TORCH_SM3_INLINE double tanh_polynomial(double z) {
  double sum = 6.48516348279311315e-6;
  sum = sum * z - 0.00003120110142579740003;
  sum = sum * z + 0.00009257116129556768271;
  sum = sum * z - 0.0002375906496055561955;
  sum = sum * z + 0.0005896606577757043347;
  sum = sum * z - 0.00145577541204780551;
  sum = sum * z + 0.003592121751154962269;
  sum = sum * z - 0.008863235103240877925;
  sum = sum * z + 0.02186948851900830576;
  sum = sum * z - 0.05396825396789699169;
  sum = sum * z + 0.133333333333330416;
  return sum * z - 0.3333333333333333294;
}

/// tanh(x) and its derivative 1 - tanh(x)^2.
template <class C>
struct Tanh {
  C value;
  C slope;
};

/// Below 0.625 by the polynomial, from there on by 1 - tanh = 2 / (exp(2x) +
/// 1), which also gives the derivative where tanh is so near to one that it has
/// no digits for it.
template <class C>
TORCH_SM3_INLINE Tanh<C> tanh_with_slope(C x) {
  using T = ExpTraits<C>;
  const C size = x < 0 ? -x : x;
  const C z = size * size;
  const C small = size + size * z * tanh_polynomial(z);
  const C twice = C(2) * size;
  const C e = exponential(twice > T::kLargest ? T::kLargest : twice);
  const C rest = C(2) / (e + C(1));
  const bool is_small = size < C(0.625);
  const C value = is_small ? small : C(1) - rest;
  const C slope = is_small ? C(1) - small * small : rest * (C(2) - rest);
  return {x < 0 ? -value : value, slope};
}

} // namespace torch_sm3::reversible
