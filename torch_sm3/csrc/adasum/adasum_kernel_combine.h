// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Weighted sums of the rows of one tile, and the wire's format. Included by
/// adasum_kernel_impl.h only.

#include "adasum_kernel_round.h"

namespace torch_sm3::distributed::TORCH_SM3_ISA {

/// The elements first <= e < last of a tile, one at a time.
template <class T, class O>
static void combine_few(
    const TileRows& tile,
    const double* coefficients,
    int64_t first,
    int64_t last,
    O* out) {
  for (int64_t e = first; e < last; ++e) {
    double sum = 0.0;
    for (int64_t i = 0; i < tile.p; ++i) {
      const double scale = tile.scales == nullptr ? 1.0 : tile.scales[i];
      const T* row = static_cast<const T*>(tile.rows[i]) + tile.start;
      sum += coefficients[i] * (scale * to_double(row[e]));
    }
    round_to(sum, out + e);
  }
}

/// The elements first <= e < last of a tile, a multiple of kStep.
template <class T, class O, bool kScaled, bool kStreams>
static void combine_steps(
    const TileRows& tile,
    const double* coefficients,
    int64_t first,
    int64_t last,
    O* out) {
  const Register<double> zero = {};
  for (int64_t e = first; e < last; e += kStep) {
    Register<double> sums[kSums] = {};
    for (int64_t i = 0; i < tile.p; ++i) {
      const T* row = static_cast<const T*>(tile.rows[i]) + tile.start + e;
      fetch<kStep>(row);
      const Register<double> c = zero + coefficients[i];
      const Register<double> scale = zero + (kScaled ? tile.scales[i] : 1.0);
#pragma GCC unroll 8
      for (int k = 0; k < kSums; ++k) {
        const Register<double> x = load<double>(row + k * kEach);
        sums[k] += c * (kScaled ? scale * x : x);
      }
    }
    round_step<O, kStreams>(sums, out + e);
  }
}

template <class T, class O, bool kScaled>
static void combine_tile(
    const TileRows& tile,
    const double* coefficients,
    O* out,
    bool streams) {
  constexpr int64_t kLine = kWidth<double> * static_cast<int64_t>(sizeof(O));
  int64_t first = 0;
  if (streams) {
    const auto address = reinterpret_cast<uintptr_t>(out);
    const auto past = static_cast<int64_t>(address % kLine);
    first = past == 0 ? 0 : (kLine - past) / static_cast<int64_t>(sizeof(O));
    first = first < tile.size ? first : tile.size;
  }
  const int64_t last = tile.size - (tile.size - first) % kStep;
  combine_few<T>(tile, coefficients, 0, first, out);
  if (streams) {
    combine_steps<T, O, kScaled, true>(tile, coefficients, first, last, out);
    end_streams();
  } else {
    combine_steps<T, O, kScaled, false>(tile, coefficients, first, last, out);
  }
  combine_few<T>(tile, coefficients, last, tile.size, out);
}

template <class T, class O>
static void combine_to(
    const TileRows& tile,
    const double* coefficients,
    O* out,
    bool streams) {
  if (tile.scales != nullptr) {
    combine_tile<T, O, true>(tile, coefficients, out, streams);
  } else {
    combine_tile<T, O, false>(tile, coefficients, out, streams);
  }
}

template <class T>
static void combine_from(
    const TileRows& tile,
    const double* coefficients,
    void* out,
    ScalarKind kind,
    bool streams) {
  switch (kind) {
    case ScalarKind::kFloat32:
      return combine_to<T>(
          tile, coefficients, static_cast<float*>(out), streams);
    case ScalarKind::kFloat64:
      return combine_to<T>(
          tile, coefficients, static_cast<double*>(out), streams);
    case ScalarKind::kFloat16:
      return combine_to<T>(tile, coefficients, static_cast<Half*>(out), false);
    case ScalarKind::kBFloat16:
      return combine_to<T>(
          tile, coefficients, static_cast<BFloat16*>(out), false);
  }
}

static void combine(
    const TileRows& tile,
    const double* coefficients,
    void* out,
    ScalarKind kind,
    bool streams) {
  const double scale = tile.scales == nullptr ? 1.0 : tile.scales[0];
  if (tile.p == 1 && kind == tile.kind && coefficients[0] * scale == 1.0) {
    // One rank: bit for bit, signed zeros and NaN included.
    const int64_t width = size_of(kind);
    __builtin_memmove(
        out,
        static_cast<const char*>(tile.rows[0]) + tile.start * width,
        tile.size * width);
    return;
  }
  switch (tile.kind) {
    case ScalarKind::kFloat32:
      return combine_from<float>(tile, coefficients, out, kind, streams);
    case ScalarKind::kFloat64:
      return combine_from<double>(tile, coefficients, out, kind, streams);
    case ScalarKind::kFloat16:
      return combine_from<Half>(tile, coefficients, out, kind, streams);
    case ScalarKind::kBFloat16:
      return combine_from<BFloat16>(tile, coefficients, out, kind, streams);
  }
}

} // namespace torch_sm3::distributed::TORCH_SM3_ISA
