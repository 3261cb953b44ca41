// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// `Simd<float>` and `Simd<double>`: the few vector operations that kernels
/// need beyond + - * /, for the instruction set that a file is compiled for.
/// The scalar form has one element, so that a kernel is written once.

#include <scalar_math.h>

#if defined(__AVX2__)
#include <immintrin.h>
// GCC 12 takes the undefined pass-through operands of its own AVX-512 header
// for a use (GCC bug 105593), wherever the functions are inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#endif

namespace torch_sm3 {
// In an unnamed namespace: each instruction set's file has types of its own.
namespace {

#define TORCH_SM3_SIMD static inline __attribute__((always_inline))

template <class C>
struct Simd;

#if defined(__AVX512F__)

template <>
struct Simd<float> {
  using Vector = __m512;
  static constexpr int kWidth = 16;
  TORCH_SM3_SIMD Vector load(const float* p) {
    return _mm512_loadu_ps(p);
  }
  TORCH_SM3_SIMD void store(float* p, Vector x) {
    _mm512_storeu_ps(p, x);
  }
  TORCH_SM3_SIMD Vector all(float x) {
    return _mm512_set1_ps(x);
  }
  TORCH_SM3_SIMD Vector min(Vector a, Vector b) {
    return _mm512_min_ps(a, b);
  }
  TORCH_SM3_SIMD Vector max(Vector a, Vector b) {
    return _mm512_max_ps(a, b);
  }
  TORCH_SM3_SIMD Vector square_root(Vector x) {
    return _mm512_sqrt_ps(x);
  }
  TORCH_SM3_SIMD bool all_within(Vector x, Vector limit) {
    return _mm512_cmp_ps_mask(_mm512_abs_ps(x), limit, _CMP_LE_OQ) == 0xffff;
  }
  TORCH_SM3_SIMD Vector zero_where_zero(Vector x, Vector y) {
    const __mmask16 kept =
        _mm512_cmp_ps_mask(y, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    return _mm512_maskz_mov_ps(kept, x);
  }
};

template <>
struct Simd<double> {
  using Vector = __m512d;
  static constexpr int kWidth = 8;
  TORCH_SM3_SIMD Vector load(const double* p) {
    return _mm512_loadu_pd(p);
  }
  TORCH_SM3_SIMD void store(double* p, Vector x) {
    _mm512_storeu_pd(p, x);
  }
  TORCH_SM3_SIMD Vector all(double x) {
    return _mm512_set1_pd(x);
  }
  TORCH_SM3_SIMD Vector min(Vector a, Vector b) {
    return _mm512_min_pd(a, b);
  }
  TORCH_SM3_SIMD Vector max(Vector a, Vector b) {
    return _mm512_max_pd(a, b);
  }
  TORCH_SM3_SIMD Vector square_root(Vector x) {
    return _mm512_sqrt_pd(x);
  }
  TORCH_SM3_SIMD bool all_within(Vector x, Vector limit) {
    return _mm512_cmp_pd_mask(_mm512_abs_pd(x), limit, _CMP_LE_OQ) == 0xff;
  }
  TORCH_SM3_SIMD Vector zero_where_zero(Vector x, Vector y) {
    const __mmask8 kept =
        _mm512_cmp_pd_mask(y, _mm512_setzero_pd(), _CMP_NEQ_UQ);
    return _mm512_maskz_mov_pd(kept, x);
  }
};

#elif defined(__AVX2__)

template <>
struct Simd<float> {
  using Vector = __m256;
  static constexpr int kWidth = 8;
  TORCH_SM3_SIMD Vector load(const float* p) {
    return _mm256_loadu_ps(p);
  }
  TORCH_SM3_SIMD void store(float* p, Vector x) {
    _mm256_storeu_ps(p, x);
  }
  TORCH_SM3_SIMD Vector all(float x) {
    return _mm256_set1_ps(x);
  }
  TORCH_SM3_SIMD Vector min(Vector a, Vector b) {
    return _mm256_min_ps(a, b);
  }
  TORCH_SM3_SIMD Vector max(Vector a, Vector b) {
    return _mm256_max_ps(a, b);
  }
  TORCH_SM3_SIMD Vector square_root(Vector x) {
    return _mm256_sqrt_ps(x);
  }
  TORCH_SM3_SIMD bool all_within(Vector x, Vector limit) {
    const Vector size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
    return _mm256_movemask_ps(_mm256_cmp_ps(size, limit, _CMP_LE_OQ)) == 0xff;
  }
  TORCH_SM3_SIMD Vector zero_where_zero(Vector x, Vector y) {
    return _mm256_and_ps(_mm256_cmp_ps(y, _mm256_setzero_ps(), _CMP_NEQ_UQ), x);
  }
};

template <>
struct Simd<double> {
  using Vector = __m256d;
  static constexpr int kWidth = 4;
  TORCH_SM3_SIMD Vector load(const double* p) {
    return _mm256_loadu_pd(p);
  }
  TORCH_SM3_SIMD void store(double* p, Vector x) {
    _mm256_storeu_pd(p, x);
  }
  TORCH_SM3_SIMD Vector all(double x) {
    return _mm256_set1_pd(x);
  }
  TORCH_SM3_SIMD Vector min(Vector a, Vector b) {
    return _mm256_min_pd(a, b);
  }
  TORCH_SM3_SIMD Vector max(Vector a, Vector b) {
    return _mm256_max_pd(a, b);
  }
  TORCH_SM3_SIMD Vector square_root(Vector x) {
    return _mm256_sqrt_pd(x);
  }
  TORCH_SM3_SIMD bool all_within(Vector x, Vector limit) {
    const Vector size = _mm256_andnot_pd(_mm256_set1_pd(-0.0), x);
    return _mm256_movemask_pd(_mm256_cmp_pd(size, limit, _CMP_LE_OQ)) == 0xf;
  }
  TORCH_SM3_SIMD Vector zero_where_zero(Vector x, Vector y) {
    return _mm256_and_pd(_mm256_cmp_pd(y, _mm256_setzero_pd(), _CMP_NEQ_UQ), x);
  }
};

#else

template <class C>
struct Simd {
  using Vector = C;
  static constexpr int kWidth = 1;
  TORCH_SM3_SIMD Vector load(const C* p) {
    return *p;
  }
  TORCH_SM3_SIMD void store(C* p, Vector x) {
    *p = x;
  }
  TORCH_SM3_SIMD Vector all(C x) {
    return x;
  }
  TORCH_SM3_SIMD Vector min(Vector a, Vector b) {
    return a < b ? a : b;
  }
  TORCH_SM3_SIMD Vector max(Vector a, Vector b) {
    return a > b ? a : b;
  }
  TORCH_SM3_SIMD Vector square_root(Vector x) {
    return torch_sm3::square_root(x);
  }
  TORCH_SM3_SIMD bool all_within(Vector x, Vector limit) {
    return (x < 0 ? -x : x) <= limit;
  }
  TORCH_SM3_SIMD Vector zero_where_zero(Vector x, Vector y) {
    return y == 0 ? C(0) : x;
  }
};

#endif

/// Writes a block of columns as rows: `out[r * pitch + c] = in[r + c *
/// stride]`.
TORCH_SM3_SIMD void turn_scalar(
    const float* in,
    int64_t stride,
    int64_t rows,
    int64_t columns,
    float* out,
    int64_t pitch) {
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) {
      out[r * pitch + c] = in[r + c * stride];
    }
  }
}

#if defined(__AVX2__)

/// `turn_scalar` of 8 x 8, in registers.
TORCH_SM3_SIMD void
turn_8x8(const float* in, int64_t stride, float* out, int64_t pitch) {
  __m256 x[8], y[8];
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm256_loadu_ps(in + i * stride);
  }
  // Pairs, then fours within each half, then the halves.
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
    x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
    x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
    x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(
        out + i * pitch, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
    _mm256_storeu_ps(
        out + (i + 4) * pitch, _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
  }
}

#endif

#undef TORCH_SM3_SIMD

} // namespace
} // namespace torch_sm3
