// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Dot products of all pairs of rows over one tile. Included by
/// adasum_kernel_impl.h only.

#include "adasum_kernel_vector.h"

namespace torch_sm3::distributed::TORCH_SM3_ISA {

/// Rows of a block of pairs whose sums stay in registers, and most columns of
/// one off the diagonal, which has more pairs.
inline constexpr int kEdge = 4;
inline constexpr int kWide = kVectorBytes == 64 ? 4 : 2;

/// A register's worth of lanes of one pair.
template <class A>
struct Lanes;

template <>
struct Lanes<double> {
  static constexpr int kParts = 1;
  Register<double> sum;

  TORCH_SM3_ALWAYS_MEMBER void load(const double* from) {
    sum = read<Register<double>>(from);
  }
  TORCH_SM3_ALWAYS_MEMBER void store(double* to) const {
    write(to, sum);
  }
  // A product of narrower elements is exact, so that fusing it with the sum
  // changes no bit.
  template <class T>
  TORCH_SM3_ALWAYS_MEMBER void add(Register<double> a, Register<double> b) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) < sizeof(double)) {
      sum = _mm512_fmadd_pd(a, b, sum);
      return;
    }
#endif
    sum += a * b;
  }
};

template <>
struct Lanes<float> {
  static constexpr int kParts = 2;
  Register<float> sum, lost;

  TORCH_SM3_ALWAYS_MEMBER void load(const float* from) {
    sum = read<Register<float>>(from);
    lost = read<Register<float>>(from + kLanes);
  }
  TORCH_SM3_ALWAYS_MEMBER void store(float* to) const {
    write(to, sum);
    write(to + kLanes, lost);
  }
  // The error of a sum of two numbers is itself a number (Knuth's two-sum).
  template <class T>
  TORCH_SM3_ALWAYS_MEMBER void add(Register<float> a, Register<float> b) {
    const Register<float> product = a * b;
    const Register<float> next = sum + product;
    const Register<float> added = next - sum;
    lost += (sum - (next - added)) + (product - added);
    sum = next;
  }
};

/// Rows of a chunk: pointers and an offset, or copies one behind the other.
template <class T>
struct Chunk {
  const void* const* rows;
  int64_t offset;
  const T* copies; // null: rows[i] + offset
  int64_t pitch;

  const T* row(int64_t i) const {
    return copies != nullptr ? copies + i * pitch
                             : static_cast<const T*>(rows[i]) + offset;
  }
};

/// Calls `function(pair, row, column)` for the pairs of a block in the order of
/// a packed Gram matrix; with kTriangle, each pair counts once.
template <int kRows, int kColumns, bool kTriangle, class Function>
TORCH_SM3_ALWAYS void for_pairs(const Function& function) {
  int pair = 0;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = kTriangle ? r : 0; c < kColumns; ++c, ++pair) {
      function(pair, r, c);
    }
  }
}

/// Groups of lanes whose sums fit the registers, beside the rows.
template <class A, int kPairs>
constexpr int groups_that_fit() {
  constexpr int kRegisters = kVectorBytes == 64 ? 32 : 16;
  constexpr int kFit = (kRegisters - 4) / (kPairs * Lanes<A>::kParts + 1);
  constexpr int kAll = static_cast<int>(kLanes) / kWidth<A>;
  return kFit >= 4 && kAll >= 4 ? 4 : kFit >= 2 && kAll >= 2 ? 2 : 1;
}

/// Adds to the lanes of the pairs of kRows rows from `i` and kColumns rows from
/// `j`; with kTriangle, j = i. `count` is a multiple of kLanes.
template <class T, class A, int kRows, int kColumns, bool kTriangle>
static void multiply_block(
    const Chunk<T>& chunk,
    int64_t p,
    int64_t i,
    int64_t j,
    int64_t count,
    A* lanes) {
  constexpr int kPairs = kTriangle ? kRows * (kRows + 1) / 2 : kRows * kColumns;
  constexpr int64_t kGroup = kWidth<A>;
  constexpr int kGroups = groups_that_fit<A, kPairs>();
  constexpr int64_t kStride = kLanes * Lanes<A>::kParts;
  const T* x[kRows];
  const T* y[kColumns];
  A* place[kRows]; // of the first pair of each row
  for (int r = 0; r < kRows; ++r) {
    x[r] = chunk.row(i + r);
    place[r] = lanes + pair_index(p, i + r, kTriangle ? i + r : j) * kStride;
  }
  for (int c = 0; c < kColumns; ++c) {
    y[c] = kTriangle ? x[c] : chunk.row(j + c);
  }
  for (int64_t first = 0; first < kLanes; first += kGroups * kGroup) {
    const auto place_of = [&](int g, int r, int c) {
      return place[r] + (kTriangle ? c - r : c) * kStride + first + g * kGroup;
    };
    Lanes<A> sums[kGroups][kPairs];
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
      for_pairs<kRows, kColumns, kTriangle>([&](int pair, int r, int c) {
        sums[g][pair].load(place_of(g, r, c));
      });
    }
    for (int64_t e = first; e < count; e += kLanes) {
      if (kTriangle && first == 0) {
        // All lanes, though this pass may take some of them only.
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          fetch<kLanes>(x[r] + e);
        }
      }
#pragma GCC unroll 8
      for (int g = 0; g < kGroups; ++g) {
        Register<A> a[kRows];
        Register<A> b[kColumns];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          a[r] = load<A>(x[r] + e + g * kGroup);
        }
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
          b[c] = kTriangle ? a[c] : load<A>(y[c] + e + g * kGroup);
        }
        for_pairs<kRows, kColumns, kTriangle>([&](int pair, int r, int c) {
          sums[g][pair].template add<T>(a[r], b[c]);
        });
      }
    }
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) {
      for_pairs<kRows, kColumns, kTriangle>([&](int pair, int r, int c) {
        sums[g][pair].store(place_of(g, r, c));
      });
    }
  }
}

/// `multiply_block` with a number of columns known at run time only.
template <class T, class A, bool kTriangle, int kColumns = 1>
static inline void multiply_columns(
    const Chunk<T>& chunk,
    int64_t p,
    int64_t i,
    int64_t j,
    int64_t columns,
    int64_t count,
    A* lanes) {
  if constexpr (kColumns <= (kTriangle ? kEdge : kWide)) {
    if (columns == kColumns) {
      constexpr int kRows = kTriangle ? kColumns : kEdge;
      multiply_block<T, A, kRows, kColumns, kTriangle>(
          chunk, p, i, j, count, lanes);
    } else {
      multiply_columns<T, A, kTriangle, kColumns + 1>(
          chunk, p, i, j, columns, count, lanes);
    }
  }
}

/// Adds to the lanes of all pairs.
template <class T, class A>
static void
multiply(const Chunk<T>& chunk, int64_t p, int64_t count, A* lanes) {
  for (int64_t i = 0; i < p; i += kEdge) {
    const int64_t rows = p - i < kEdge ? p - i : kEdge;
    multiply_columns<T, A, true>(chunk, p, i, i, rows, count, lanes);
    for (int64_t j = i + kEdge; j < p; j += kWide) {
      const int64_t columns = p - j < kWide ? p - j : kWide;
      multiply_columns<T, A, false>(chunk, p, i, j, columns, count, lanes);
    }
  }
}

static inline double add_lanes(double* lanes) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

static inline double add_lanes(const float* lanes) {
  double wide[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    wide[lane] = static_cast<double>(lanes[lane]) +
                 static_cast<double>(lanes[lane + kLanes]);
  }
  return add_lanes(wide);
}

/// Adds a chunk of `count` elements that begins at `offset` to all lanes.
template <class T, class A>
static inline void add_chunk(
    const TileRows& tile,
    int64_t offset,
    int64_t count,
    double* scratch,
    A* lanes) {
  const int64_t p = tile.p;
  Chunk<T> chunk{tile.rows, offset, nullptr, kChunk};
  T* copies = reinterpret_cast<T*>(scratch);
  if (sizeof(T) == sizeof(double) && tile.scales != nullptr) {
    // Only float64 rows can overflow or vanish in the products.
    for (int64_t i = 0; i < p; ++i) {
      const T* row = chunk.row(i);
      for (int64_t e = 0; e < count; ++e) {
        round_to(tile.scales[i] * to_double(row[e]), copies + i * kChunk + e);
      }
    }
    chunk.copies = copies;
  }
  const int64_t whole = count - count % kLanes;
  multiply<T, A>(chunk, p, whole, lanes);
  if (whole < count) {
    // Zeros up to a full row of lanes: +0 changes no sum that began at +0.
    for (int64_t i = 0; i < p; ++i) {
      const T* row = chunk.row(i) + whole;
      T padded[kLanes] = {};
      __builtin_memcpy(padded, row, (count - whole) * sizeof(T));
      __builtin_memcpy(copies + i * kChunk, padded, sizeof(padded));
    }
    chunk.copies = copies;
    multiply<T, A>(chunk, p, kLanes, lanes);
  }
}

template <class T, class A>
static void dots_of_tile(const TileRows& tile, double* scratch, double* sums) {
  constexpr int64_t kStride = kLanes * Lanes<A>::kParts;
  const int64_t pairs = pair_count(tile.p);
  A* lanes = reinterpret_cast<A*>(scratch + tile.p * kChunk);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    sums[pair] = 0.0;
  }
  for (int64_t strip = 0; strip < tile.size; strip += kStrip) {
    const int64_t end = strip + kStrip < tile.size ? strip + kStrip : tile.size;
    for (int64_t k = 0; k < pairs * kStride; ++k) {
      lanes[k] = 0;
    }
    for (int64_t first = strip; first < end; first += kChunk) {
      const int64_t count = first + kChunk < end ? kChunk : end - first;
      add_chunk<T, A>(tile, tile.start + first, count, scratch, lanes);
    }
    for (int64_t pair = 0; pair < pairs; ++pair) {
      sums[pair] += add_lanes(lanes + pair * kStride);
    }
  }
  if (sizeof(T) != sizeof(double) && tile.scales != nullptr) {
    // Powers of two: what scaled elements would give, bit for bit.
    double* sum = sums;
    for (int64_t i = 0; i < tile.p; ++i) {
      for (int64_t j = i; j < tile.p; ++j, ++sum) {
        *sum = *sum * tile.scales[i] * tile.scales[j];
      }
    }
  }
}

template <class T>
static void
dots_of(const TileRows& tile, bool float32, double* scratch, double* sums) {
  if (float32) {
    dots_of_tile<T, float>(tile, scratch, sums);
  } else {
    dots_of_tile<T, double>(tile, scratch, sums);
  }
}

static void
dots(const TileRows& tile, bool float32, double* scratch, double* sums) {
  switch (tile.kind) {
    case ScalarKind::kFloat32:
      return dots_of<float>(tile, float32, scratch, sums);
    case ScalarKind::kFloat64:
      return dots_of_tile<double, double>(tile, scratch, sums);
    case ScalarKind::kFloat16:
      return dots_of<Half>(tile, float32, scratch, sums);
    case ScalarKind::kBFloat16:
      return dots_of<BFloat16>(tile, float32, scratch, sums);
  }
}

} // namespace torch_sm3::distributed::TORCH_SM3_ISA
