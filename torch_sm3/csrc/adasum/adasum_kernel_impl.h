// SPDX-License-Identifier: Apache-2.0

/// \file
/// The one implementation of the CPU kernels, compiled once per instruction
/// set. The including file defines TORCH_SM3_ISA as its namespace. Everything
/// here is `static`, and no function of the standard library is used: a shared
/// inline function compiled for AVX-512 could be linked into all callers.

#include "adasum_kernel.h"

namespace torch_sm3::distributed::TORCH_SM3_ISA {

// Eight float64: one register of AVX-512, split by the compiler for the others.
// `aligned(8)` allows any address of a double.
typedef double Vector __attribute__((vector_size(64), aligned(8), may_alias));

template <class T>
static inline void widen(const T* in, int64_t size, double* out) {
  for (int64_t e = 0; e < size; ++e) {
    out[e] = to_double(in[e]);
  }
  // Zeros up to a full row of lanes: adding +0 changes no sum that started at
  // +0.
  for (int64_t e = size; e % kLanes != 0; ++e) {
    out[e] = 0.0;
  }
}

static inline void
multiply_add(const double* a, const double* b, int64_t size, double* lanes) {
  Vector* sums = reinterpret_cast<Vector*>(lanes);
  Vector s0 = sums[0], s1 = sums[1], s2 = sums[2], s3 = sums[3];
  for (int64_t e = 0; e < size; e += kLanes) {
    const Vector* x = reinterpret_cast<const Vector*>(a + e);
    const Vector* y = reinterpret_cast<const Vector*>(b + e);
    s0 += x[0] * y[0];
    s1 += x[1] * y[1];
    s2 += x[2] * y[2];
    s3 += x[3] * y[3];
  }
  sums[0] = s0;
  sums[1] = s1;
  sums[2] = s2;
  sums[3] = s3;
}

static inline double add_lanes(double* lanes) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

template <class T>
static inline void dots_of_tile(
    const void* const* rows,
    int64_t p,
    int64_t start,
    int64_t size,
    double* scratch,
    double* sums) {
  double* wide = scratch;
  double* lanes = scratch + p * kChunk;
  const int64_t pairs = pair_count(p);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    sums[pair] = 0.0;
  }
  for (int64_t strip = 0; strip < size; strip += kStrip) {
    const int64_t end = strip + kStrip < size ? strip + kStrip : size;
    for (int64_t k = 0; k < pairs * kLanes; ++k) {
      lanes[k] = 0.0;
    }
    for (int64_t chunk = strip; chunk < end; chunk += kChunk) {
      const int64_t count = chunk + kChunk < end ? kChunk : end - chunk;
      for (int64_t i = 0; i < p; ++i) {
        widen(
            static_cast<const T*>(rows[i]) + start + chunk,
            count,
            wide + i * kChunk);
      }
      double* sum = lanes;
      for (int64_t i = 0; i < p; ++i) {
        for (int64_t j = i; j < p; ++j, sum += kLanes) {
          multiply_add(wide + i * kChunk, wide + j * kChunk, count, sum);
        }
      }
    }
    for (int64_t pair = 0; pair < pairs; ++pair) {
      sums[pair] += add_lanes(lanes + pair * kLanes);
    }
  }
}

template <class T>
static inline void combine_tile(
    const void* const* rows,
    int64_t p,
    const double* coefficients,
    int64_t start,
    int64_t size,
    void* out) {
  if (p == 1 && coefficients[0] == 1.0) {
    // One rank: bit for bit, signed zeros and NaN included.
    memmove(
        static_cast<T*>(out) + start,
        static_cast<const T*>(rows[0]) + start,
        static_cast<size_t>(size) * sizeof(T));
    return;
  }
  double sum[kChunk];
  for (int64_t chunk = 0; chunk < size; chunk += kChunk) {
    const int64_t count = chunk + kChunk < size ? kChunk : size - chunk;
    for (int64_t e = 0; e < count; ++e) {
      sum[e] = 0.0;
    }
    for (int64_t i = 0; i < p; ++i) {
      const T* row = static_cast<const T*>(rows[i]) + start + chunk;
      const double c = coefficients[i];
      for (int64_t e = 0; e < count; ++e) {
        sum[e] += c * to_double(row[e]);
      }
    }
    T* result = static_cast<T*>(out) + start + chunk;
    for (int64_t e = 0; e < count; ++e) {
      round_to(sum[e], &result[e]);
    }
  }
}

static void dots(
    const void* const* rows,
    int64_t p,
    ScalarKind kind,
    int64_t start,
    int64_t size,
    double* scratch,
    double* sums) {
  switch (kind) {
    case ScalarKind::kFloat32:
      return dots_of_tile<float>(rows, p, start, size, scratch, sums);
    case ScalarKind::kFloat64:
      return dots_of_tile<double>(rows, p, start, size, scratch, sums);
    case ScalarKind::kFloat16:
      return dots_of_tile<Half>(rows, p, start, size, scratch, sums);
    case ScalarKind::kBFloat16:
      return dots_of_tile<BFloat16>(rows, p, start, size, scratch, sums);
  }
}

static void combine(
    const void* const* rows,
    int64_t p,
    const double* coefficients,
    ScalarKind kind,
    int64_t start,
    int64_t size,
    void* out) {
  switch (kind) {
    case ScalarKind::kFloat32:
      return combine_tile<float>(rows, p, coefficients, start, size, out);
    case ScalarKind::kFloat64:
      return combine_tile<double>(rows, p, coefficients, start, size, out);
    case ScalarKind::kFloat16:
      return combine_tile<Half>(rows, p, coefficients, start, size, out);
    case ScalarKind::kBFloat16:
      return combine_tile<BFloat16>(rows, p, coefficients, start, size, out);
  }
}

const AdasumKernels kAdasumKernels = {&dots, &combine};

} // namespace torch_sm3::distributed::TORCH_SM3_ISA
