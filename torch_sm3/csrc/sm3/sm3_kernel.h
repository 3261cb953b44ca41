// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// CPU kernels of SM3: one row of one tensor. Compiled once for each
/// instruction set from sm3_kernel_impl.h; the caller walks the rows and owns
/// the threads.

#include <sm3_math.h>

#include <cstdint>

namespace torch_sm3 {

/// Dimensions of a tensor after those that follow each other in memory are
/// merged.
constexpr int kSM3MaxDims = 64;

/// A tensor as a sequence: its elements in logical (row-major) order, wherever
/// they lie in memory. `data` is null for a tensor that is not there.
struct SM3Strided {
  void* data = nullptr;
  ScalarKind kind = ScalarKind::kFloat32;
  int dims = 0;
  int64_t sizes[kSM3MaxDims];
  int64_t strides[kSM3MaxDims]; ///< in elements
};

/// The tensors of one parameter. They have as many elements in the same order.
struct SM3Tensors {
  SM3Strided param;
  SM3Strided grad;
  SM3Strided momentum;
  SM3Strided compensation; ///< of Kahan summation, of the parameter's kind
  float* scales = nullptr; ///< momentum is int8; one per row and block
  int64_t last = 1;        ///< the parameter's last size: a row of `scales`
  bool stochastic = false; ///< bfloat16 weights and int8 momentum round so
  uint64_t key = 0;        ///< of the random numbers
  SM3Strided index;        ///< its strides give each element's global number
  int64_t index_start = 0;
};

/// Elements of one parameter that share all accumulators but the last kind.
template <class C>
struct SM3Row {
  const SM3Tensors* tensors;
  int64_t first;   ///< the row's first element in the tensors' order
  int64_t count;   ///< elements
  const C* grad;   ///< the row's gradients, contiguous; null: in `tensors`
  C smallest;      ///< least accumulator that the whole row shares
  const C* column; ///< least accumulator of each element besides
  C* new_column;   ///< is raised to nu; if `diagonal`, is set to nu
  bool diagonal;   ///< `smallest` is not used
  int64_t ahead;   ///< elements to what is updated soon; 0: along the row
};

/// Elements that kernels convert at a time where a tensor is not contiguous or
/// not of the computing type: a few such pieces stay in the first-level cache.
constexpr int64_t kSM3Piece = 1024;

TORCH_SM3_INLINE int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/// Elements from `first` on, of `left`, that are one piece: whole blocks where
/// the momentum has scales. `first` must begin a block.
TORCH_SM3_INLINE int64_t
sm3_piece(const SM3Tensors& tensors, int64_t first, int64_t left) {
  if (tensors.scales != nullptr) {
    const int64_t rest = tensors.last - first % tensors.last;
    const int64_t whole = kSM3Piece - (kSM3Piece - rest) % tensors.last;
    return least(left, rest < kSM3Piece ? whole : kSM3Piece);
  }
  return least(left, kSM3Piece);
}

/// sm3_update_row_ISA: updates parameter, momentum and column of one row and
/// returns its largest nu. sm3_maxima_row_ISA: raises `new_column` to the
/// squared gradients, writes nothing else, and returns the largest one.
/// sm3_turn_ISA: `out[r * pitch + c] = in[r + c * stride]` for a block of a
/// gradient that lies across its parameter.
#define TORCH_SM3_DECLARE_SM3_ROW(ISA)                                         \
  float sm3_update_row_##ISA(                                                  \
      const SM3Row<float>& row, const SM3Coefficients<float>& coefficients);   \
  double sm3_update_row_##ISA(                                                 \
      const SM3Row<double>& row, const SM3Coefficients<double>& coefficients); \
  float sm3_maxima_row_##ISA(                                                  \
      const SM3Row<float>& row, const SM3Coefficients<float>& coefficients);   \
  double sm3_maxima_row_##ISA(                                                 \
      const SM3Row<double>& row, const SM3Coefficients<double>& coefficients); \
  void sm3_turn_##ISA(                                                         \
      const float* in,                                                         \
      int64_t stride,                                                          \
      int64_t rows,                                                            \
      int64_t columns,                                                         \
      float* out,                                                              \
      int64_t pitch);

TORCH_SM3_DECLARE_SM3_ROW(scalar)
TORCH_SM3_DECLARE_SM3_ROW(avx2)
TORCH_SM3_DECLARE_SM3_ROW(avx512)

#undef TORCH_SM3_DECLARE_SM3_ROW

} // namespace torch_sm3
