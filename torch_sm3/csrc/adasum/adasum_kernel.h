// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// CPU kernels of Adasum: dot products, weighted sums and the 16-bit format of
/// the wire, one tile at a time.
///
/// A layer is cut into tiles of 16384 elements, counted from its own start, and
/// a tile into strips of 4096. Element e of a strip belongs to lane e mod 32;
/// a lane adds its products in ascending order, the lanes of a strip are added
/// as a binary tree (16 apart, then 8, 4, 2, 1), strips and tiles in ascending
/// order. Every kernel, on CPU and CUDA alike, follows this order, so the sums
/// have the same bits for any instruction set, thread count and bucket layout.
///
/// With float32 accumulation a lane is a pair of float32: the sum of its
/// rounded products and what the roundings of that sum lost. Only the rounding
/// of each product remains, at most 2^-24 of its size, so that an inner product
/// is off by no more than 6e-8 |g_i| |g_j|. Lanes, strips and tiles are added
/// in float64.

#include "scalar_math.h"

#include <cstdint>

namespace torch_sm3::distributed {

inline constexpr int64_t kTile = 16384;
inline constexpr int64_t kStrip = 4096;
inline constexpr int64_t kLanes = 32;
/// Elements of each row that are worked on at a time; those of a few rows fit
/// the first-level cache.
inline constexpr int64_t kChunk = 1024;

/// Number of pairs i <= j of p rows: the length of a packed Gram matrix.
constexpr int64_t pair_count(int64_t p) {
  return p * (p + 1) / 2;
}

/// Place of the pair i <= j in a packed Gram matrix.
constexpr int64_t pair_index(int64_t p, int64_t i, int64_t j) {
  return i * p - i * (i - 1) / 2 + (j - i);
}

/// Number of float64 that `AdasumKernels::dots` needs as scratch.
constexpr int64_t dots_scratch(int64_t p) {
  return p * kChunk + pair_count(p) * kLanes;
}

/// The leaves of one tile: `scales[i] * rows[i][start + e]` for 0 <= e < size.
struct TileRows {
  const void* const* rows;
  int64_t p;
  ScalarKind kind;
  const double* scales; ///< p powers of two, or null: all 1
  int64_t start, size;
};

/// Largest magnitudes of a run of elements.
struct Largest {
  double finite; ///< of those that are finite; 0 if there are none
  bool all_finite;
};

/// The kernels of one instruction set.
struct AdasumKernels {
  /// Writes the dot products of all pairs of rows over one tile: `sums`
  /// receives (0,0), (0,1), ..., (0,p-1), (1,1), ...
  ///
  /// \param float32 add the products of a strip in float32; ignored for
  ///                float64 rows
  void (
      *dots)(const TileRows& tile, bool float32, double* scratch, double* sums);

  /// Writes `out[e] = sum_i coefficients[i] * (scales[i] * rows[i][e])`: from
  /// +0 in ascending order, each product rounded, then added, the sum rounded
  /// once. `out` points at the tile's first element and may be that of a row
  /// of the same kind.
  ///
  /// \param streams write past the caches
  void (*combine)(
      const TileRows& tile,
      const double* coefficients,
      void* out,
      ScalarKind kind,
      bool streams);

  Largest (*largest)(const void* in, ScalarKind kind, int64_t size);

  /// Writes `out[e] = factor * in[e]`, rounded once.
  void (*rescale)(
      const void* in,
      ScalarKind from,
      int64_t size,
      double factor,
      void* out,
      ScalarKind to);

  /// Adds the hashes of the words first <= k < last of a buffer; see
  /// `hash_word`.
  uint64_t (*hash)(const void* data, int64_t first, int64_t last);
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
