// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Kernels of `reversible_quantize`, `reversible_grid_add` and
/// `reversible_grid_sub` on flat memory. Compiled once for each instruction set
/// from grid_kernel_impl.h.

#include <scalar_math.h>

#include <cstdint>

namespace torch_sm3::reversible {

enum class GridOp : int8_t { kQuantize, kAdd, kSubtract };

struct GridSum {
  const void* acc; ///< unused by kQuantize
  const void* value;
  void* out;
  ScalarKind kind;       ///< of acc and out: float32 or float64
  ScalarKind value_kind; ///< for kQuantize the same
  GridOp op;
  int bits;
};

/// Computes the elements from `begin` to `end`.
/// \return the largest magnitude_bits of grid_math.h, of kAdd only
int64_t grid_scalar(const GridSum& sum, int64_t begin, int64_t end);
int64_t grid_avx2(const GridSum& sum, int64_t begin, int64_t end);
int64_t grid_avx512(const GridSum& sum, int64_t begin, int64_t end);

} // namespace torch_sm3::reversible
