// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Registers of float64 rounded to every element type, with the bits of
/// `round_to`. Included by adasum_kernel_impl.h only.

#include "adasum_kernel_vector.h"

namespace torch_sm3::distributed::TORCH_SM3_ISA {

/// Registers of float64 in a step, and its elements.
inline constexpr int kSums = 4;
inline constexpr int kEach = kWidth<double>;
inline constexpr int64_t kStep = int64_t{kSums} * kEach;

#if defined(__AVX2__)

using Floats = VectorOf<float, kEach>;
using Bits32 = VectorOf<uint32_t, kEach>;
using Bits16 = VectorOf<uint16_t, kEach>;
using Bits64 = VectorOf<int64_t, kEach>;

// Leaves 24 digits, the last of them odd if any that went was not zero, so that
// the rounding to 16 bits sees on which side of a tie the number was.
TORCH_SM3_ALWAYS Floats to_odd_floats(Register<double> x) {
  constexpr int64_t kRest = (int64_t{1} << 29) - 1;
  const Bits64 bits = read<Bits64>(&x);
  const Bits64 sticky = ((bits & kRest) + kRest) & (kRest + 1);
  const Bits64 kept = (bits & ~kRest) | sticky;
  return __builtin_convertvector(read<Register<double>>(&kept), Floats);
}

TORCH_SM3_ALWAYS Bits16 narrow(Floats x, BFloat16 /*to*/) {
  const Bits32 bits = read<Bits32>(&x);
  const Bits32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Bits32 nan = {};
  const auto is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return __builtin_convertvector(is_nan ? nan + 0x7fc0u : rounded, Bits16);
}

TORCH_SM3_ALWAYS Bits16 narrow(Floats x, Half /*to*/) {
  const Bits32 bits = read<Bits32>(&x);
  // The instruction keeps digits of a NaN, we keep none.
  const Bits32 quiet = (bits & 0x80000000u) | 0x7fc00000u;
  const Bits32 canonical = (bits & 0x7fffffffu) > 0x7f800000u ? quiet : bits;
#if defined(__AVX512F__)
  const __m128i halves =
      _mm256_cvtps_ph(read<__m256>(&canonical), _MM_FROUND_TO_NEAREST_INT);
#else
  const __m128i halves =
      _mm_cvtps_ph(read<__m128>(&canonical), _MM_FROUND_TO_NEAREST_INT);
#endif
  return read<Bits16>(&halves);
}

// True if a number is below the normal numbers of float32 and not zero: there
// it has fewer than 24 digits.
TORCH_SM3_ALWAYS bool any_tiny(const Register<double>* x) {
  Bits64 found = {};
#pragma GCC unroll 8
  for (int k = 0; k < kSums; ++k) {
    found |= (x[k] < 0x1p-126) & (x[k] > -0x1p-126) & (x[k] != 0.0);
  }
#if defined(__AVX512F__)
  return _mm512_test_epi64_mask(read<__m512i>(&found), read<__m512i>(&found)) !=
         0;
#else
  return _mm256_testz_si256(read<__m256i>(&found), read<__m256i>(&found)) == 0;
#endif
}

#endif

/// Rounds a step to where it belongs.
template <class O, bool kStreams>
TORCH_SM3_ALWAYS void round_step(const Register<double>* sums, O* out) {
  if constexpr (sizeof(O) > 2) {
#pragma GCC unroll 8
    for (int k = 0; k < kSums; ++k) {
      using Rounded = VectorOf<O, kEach>;
      const Rounded x = __builtin_convertvector(sums[k], Rounded);
      if constexpr (kStreams) {
        stream(out + k * kEach, x);
      } else {
        write(out + k * kEach, x);
      }
    }
    return;
  }
  if constexpr (sizeof(O) == 2) {
#if defined(__AVX2__)
    if (!any_tiny(sums)) {
#pragma GCC unroll 8
      for (int k = 0; k < kSums; ++k) {
        write(out + k * kEach, narrow(to_odd_floats(sums[k]), O{}));
      }
      return;
    }
#endif
    for (int64_t e = 0; e < kStep; ++e) {
      round_to(sums[e / kEach][e % kEach], out + e);
    }
  }
}

} // namespace torch_sm3::distributed::TORCH_SM3_ISA
