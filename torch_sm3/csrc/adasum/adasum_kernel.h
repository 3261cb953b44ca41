// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// CPU kernels of Adasum: dot products and weighted sums of one tile.
///
/// A layer is cut into tiles of 16384 elements, counted from its own start, and
/// a tile into strips of 2048. Element e of a strip belongs to lane e mod 32;
/// a lane adds its products in ascending order, the lanes of a strip are added
/// as a binary tree (16 apart, then 8, 4, 2, 1), strips and tiles in ascending
/// order. Every kernel, on CPU and CUDA alike, follows this order, so the sums
/// have the same bits for any instruction set, thread count and bucket layout.

#include "scalar_math.h"

#include <cstdint>

namespace torch_sm3::distributed {

inline constexpr int64_t kTile = 16384;
inline constexpr int64_t kStrip = 2048;
inline constexpr int64_t kLanes = 32;
/// Elements that are widened to float64 at a time; a chunk of each of a few
/// rows fits the first-level cache.
inline constexpr int64_t kChunk = 512;

/// Number of pairs i <= j of p rows: the length of a packed Gram matrix.
constexpr int64_t pair_count(int64_t p) {
  return p * (p + 1) / 2;
}

/// Number of float64 that `AdasumKernels::dots` needs as scratch.
constexpr int64_t dots_scratch(int64_t p) {
  return p * kChunk + pair_count(p) * kLanes;
}

/// The kernels of one instruction set.
struct AdasumKernels {
  /// Writes the dot products of all pairs of rows over one tile.
  ///
  /// `sums` receives (0,0), (0,1), ..., (0,p-1), (1,1), ...
  void (*dots)(
      const void* const* rows,
      int64_t p,
      ScalarKind kind,
      int64_t start,
      int64_t size,
      double* scratch,
      double* sums);

  /// Writes `out[e] = sum_i coefficients[i] * rows[i][e]`, rounded once, for
  /// the elements of one tile. `out` may be one of the rows.
  void (*combine)(
      const void* const* rows,
      int64_t p,
      const double* coefficients,
      ScalarKind kind,
      int64_t start,
      int64_t size,
      void* out);
};

namespace scalar {
extern const AdasumKernels kAdasumKernels;
}
namespace avx2 {
extern const AdasumKernels kAdasumKernels;
}
namespace avx512 {
extern const AdasumKernels kAdasumKernels;
}

} // namespace torch_sm3::distributed
