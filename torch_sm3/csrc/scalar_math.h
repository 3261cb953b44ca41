// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Element types and their conversions, once for host and device.
///
/// Everything is `static inline`: kernel files are compiled for several
/// instruction sets, and a function with external linkage could be taken by the
/// linker from the file of the strongest one and run on a machine without it.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define TORCH_SM3_INLINE static __host__ __device__ __forceinline__
#else
#define TORCH_SM3_INLINE static inline __attribute__((always_inline))
#endif

namespace torch_sm3 {

/// Element types of tensors that kernels read and write.
enum class ScalarKind : int8_t { kFloat32, kFloat64, kFloat16, kBFloat16 };

/// Bytes of one element.
TORCH_SM3_INLINE int64_t size_of(ScalarKind kind) {
  return kind == ScalarKind::kFloat64   ? 8
         : kind == ScalarKind::kFloat32 ? 4
                                        : 2;
}

/// A float16 as its bits; arithmetic happens in float or double.
struct Half {
  uint16_t bits;
};

/// A bfloat16 as its bits; arithmetic happens in float or double.
struct BFloat16 {
  uint16_t bits;
};

TORCH_SM3_INLINE uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

TORCH_SM3_INLINE float float_from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

TORCH_SM3_INLINE float to_float(float x) {
  return x;
}

TORCH_SM3_INLINE float to_float(BFloat16 x) {
  return float_from_bits(static_cast<uint32_t>(x.bits) << 16);
}

TORCH_SM3_INLINE float to_float(Half x) {
  const uint32_t exponent_mask = 0x7c00u << 13;
  uint32_t bits = (x.bits & 0x7fffu) << 13;
  const uint32_t exponent = bits & exponent_mask;
  bits += (127u - 15u) << 23;
  // Infinity and NaN keep an all-ones exponent.
  bits += exponent == exponent_mask ? (128u - 16u) << 23 : 0u;
  // A subnormal has no hidden one: put one there and subtract it as a number.
  const float subnormal =
      float_from_bits(bits + (1u << 23)) - float_from_bits(113u << 23);
  const uint32_t magnitude = exponent == 0 ? float_bits(subnormal) : bits;
  return float_from_bits(
      magnitude | (static_cast<uint32_t>(x.bits & 0x8000u) << 16));
}

/// Rounds correctly, as IEEE asks.
TORCH_SM3_INLINE float square_root(float x) {
  return sqrtf(x);
}
TORCH_SM3_INLINE double square_root(double x) {
  return sqrt(x);
}

/// Converts to float64, exactly.
TORCH_SM3_INLINE double to_double(double x) {
  return x;
}
template <class T>
TORCH_SM3_INLINE double to_double(T x) {
  return static_cast<double>(to_float(x));
}

TORCH_SM3_INLINE void round_to(float x, float* out) {
  *out = x;
}

/// Rounds to nearest even, NaN to the quiet NaN.
TORCH_SM3_INLINE void round_to(float x, BFloat16* out) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  out->bits = static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
}

/// Rounds to nearest even, overflow to infinity, NaN to the quiet NaN.
TORCH_SM3_INLINE void round_to(float x, Half* out) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // 65536 and above; what rounds up to it arrives there by the carry below.
  const uint32_t large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  // Below 2^-14 the sum with 0.5, whose last place is float16's smallest
  // subnormal, does the rounding.
  const uint32_t small =
      float_bits(float_from_bits(magnitude) + 0.5f) - float_bits(0.5f);
  const uint32_t normal =
      (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t value = magnitude >= 0x47800000u  ? large
                         : magnitude < 0x38800000u ? small
                                                   : normal;
  out->bits = static_cast<uint16_t>(value | ((bits >> 16) & 0x8000u));
}

TORCH_SM3_INLINE void round_to(double x, double* out) {
  *out = x;
}

TORCH_SM3_INLINE void round_to(double x, float* out) {
  *out = static_cast<float>(x);
}

/// Rounds a float64 to float32 towards the odd neighbour, so that a second
/// rounding to 16 bits gives what one direct rounding gives.
TORCH_SM3_INLINE float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = static_cast<double>(nearest);
  uint32_t bits = float_bits(nearest);
  if (back != x && x == x && (bits & 1u) == 0u) {
    const double size = x < 0 ? -x : x;
    const double back_size = back < 0 ? -back : back;
    bits += back_size < size ? 1u : ~0u;
  }
  return float_from_bits(bits);
}

template <class T>
TORCH_SM3_INLINE void round_to(double x, T* out) {
  round_to(round_to_odd(x), out);
}

} // namespace torch_sm3
