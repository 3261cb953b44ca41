// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Vectors of the widest registers of the instruction set that a file is
/// compiled for, and their loads from every element type. Included by
/// adasum_kernel_impl.h only.

#include "simd.h"

#define TORCH_SM3_ALWAYS static TORCH_SM3_ALWAYS_MEMBER
#define TORCH_SM3_ALWAYS_MEMBER inline __attribute__((always_inline))

namespace torch_sm3::distributed::TORCH_SM3_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

/// `kCount` elements of type E.
template <class E, int kCount>
struct Vectors {
  typedef E Type __attribute__((vector_size(kCount * sizeof(E))));
};
template <class E, int kCount>
using VectorOf = typename Vectors<E, kCount>::Type;

/// Elements of type A in one register.
template <class A>
inline constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(A));
/// One register of type A.
template <class A>
using Register = VectorOf<A, kWidth<A>>;

template <class V>
TORCH_SM3_ALWAYS V read(const void* from) {
  V x;
  __builtin_memcpy(&x, from, sizeof(V));
  return x;
}

template <class V>
TORCH_SM3_ALWAYS void write(void* to, V x) {
  __builtin_memcpy(to, &x, sizeof(V));
}

/// Writes past the caches where `to` is a multiple of the vector's size.
template <class V>
TORCH_SM3_ALWAYS void stream(void* to, V x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) {
    return _mm512_stream_si512(static_cast<__m512i*>(to), read<__m512i>(&x));
  }
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) {
    return _mm256_stream_si256(static_cast<__m256i*>(to), read<__m256i>(&x));
  }
  if constexpr (sizeof(V) == 16) {
    return _mm_stream_si128(static_cast<__m128i*>(to), read<__m128i>(&x));
  }
#endif
  write(to, x);
}

/// Fetches `kCount` elements that stand some lines behind `place`: sooner than
/// the hardware, which stops at pages and does not foresee skipped lines.
template <int64_t kCount, class T>
TORCH_SM3_ALWAYS void fetch(const T* place) {
  constexpr int64_t kLine = 64;
  constexpr int64_t kAhead = 2048;
  constexpr int64_t kBytes = kCount * static_cast<int64_t>(sizeof(T));
#pragma GCC unroll 8
  for (int64_t line = 0; line < kBytes; line += kLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(place) + kAhead + line);
  }
}

/// Orders streamed writes before all that follows.
TORCH_SM3_ALWAYS void end_streams() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

template <int kCount>
TORCH_SM3_ALWAYS VectorOf<float, kCount> load_floats(const float* from) {
  return read<VectorOf<float, kCount>>(from);
}

template <int kCount>
TORCH_SM3_ALWAYS VectorOf<float, kCount> load_floats(const BFloat16* from) {
#if defined(__AVX512F__)
  if constexpr (kCount == 16) {
    const auto wide = _mm512_cvtepu16_epi32(read<__m256i>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
#endif
#if defined(__AVX2__)
  if constexpr (kCount == 8) {
    const auto wide = _mm256_cvtepu16_epi32(read<__m128i>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  if constexpr (kCount == 4) {
    const auto four = _mm_cvtsi64_si128(read<int64_t>(from));
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(four), 16));
  }
#endif
  const auto bits =
      __builtin_convertvector(
          (read<VectorOf<uint16_t, kCount>>(from)), VectorOf<uint32_t, kCount>)
      << 16;
  return read<VectorOf<float, kCount>>(&bits);
}

template <int kCount>
TORCH_SM3_ALWAYS VectorOf<float, kCount> load_floats(const Half* from) {
  VectorOf<float, kCount> x;
#if defined(__AVX512F__)
  if constexpr (kCount == 16) {
    return _mm512_cvtph_ps(read<__m256i>(from));
  }
#endif
#if defined(__F16C__)
  if constexpr (kCount == 8) {
    return _mm256_cvtph_ps(read<__m128i>(from));
  }
  if constexpr (kCount == 4) {
    return _mm_cvtph_ps(_mm_cvtsi64_si128(read<int64_t>(from)));
  }
#endif
  for (int k = 0; k < kCount; ++k) {
    x[k] = to_float(from[k]);
  }
  return x;
}

/// Widens half a register of float32. The compiler's own conversion takes two
/// halves of it apart.
TORCH_SM3_ALWAYS Register<double> widen(VectorOf<float, kWidth<double>> x) {
#if defined(__AVX512F__)
  return _mm512_cvtps_pd(x);
#elif defined(__AVX2__)
  return _mm256_cvtps_pd(x);
#else
  return __builtin_convertvector(x, Register<double>);
#endif
}

/// One register of type A from the elements at `from`, exactly.
template <class A, class T>
TORCH_SM3_ALWAYS Register<A> load(const T* from) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return read<Register<A>>(from);
  } else if constexpr (sizeof(A) == sizeof(float)) {
    return load_floats<kWidth<A>>(from);
  } else {
    return widen(load_floats<kWidth<A>>(from));
  }
}

} // namespace torch_sm3::distributed::TORCH_SM3_ISA
