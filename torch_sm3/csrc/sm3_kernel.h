// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// CPU kernel of SM3: one row of one tensor. Compiled once for each instruction
/// set from sm3_kernel_impl.h; the caller walks the rows and owns the threads.

#include <sm3_math.h>

#include <cstdint>

namespace torch_sm3 {

/// One row (all indices but the last are fixed) and its accumulators.
template <class C>
struct SM3Row {
  int64_t count; ///< elements
  void* param;
  const void* grad;
  void* momentum;       ///< null without momentum
  int64_t param_stride; ///< in elements, as the two below
  int64_t grad_stride;
  int64_t momentum_stride;
  ScalarKind param_kind; ///< of `momentum` too
  ScalarKind grad_kind;
  C smallest;      ///< least accumulator of the dimensions before the last
  const C* column; ///< old accumulator of the last dimension
  C* new_column;   ///< is raised to nu; unused if `diagonal`
  bool diagonal;   ///< `column` is the only accumulator and is replaced by nu
};

/// Updates parameter, momentum and column accumulator of one row.
/// \return the largest nu of the row.
#define TORCH_SM3_DECLARE_SM3_ROW(ISA)                                       \
  float sm3_update_row_##ISA(                                                \
      const SM3Row<float>& row, const SM3Coefficients<float>& coefficients); \
  double sm3_update_row_##ISA(                                               \
      const SM3Row<double>& row, const SM3Coefficients<double>& coefficients);

TORCH_SM3_DECLARE_SM3_ROW(scalar)
TORCH_SM3_DECLARE_SM3_ROW(avx2)
TORCH_SM3_DECLARE_SM3_ROW(avx512)

#undef TORCH_SM3_DECLARE_SM3_ROW

} // namespace torch_sm3
