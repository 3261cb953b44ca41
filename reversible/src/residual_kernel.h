// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Kernels of `reversible_add` and `reversible_sub` on flat memory. Compiled
/// once for each instruction set from residual_kernel_impl.h.

#include <scalar_math.h>

#include <cstdint>

namespace torch_sm3::reversible {

/// `out[i] = acc[i] + value[i]`, or minus, for all elements.
struct Residual {
  const void* acc;
  const void* value;
  void* out;
  ScalarKind acc_kind; ///< of `out` too
  ScalarKind value_kind;
  bool subtract;
};

/// Computes the elements from `begin` to `end`.
void residual_scalar(const Residual& residual, int64_t begin, int64_t end);
void residual_avx2(const Residual& residual, int64_t begin, int64_t end);
void residual_avx512(const Residual& residual, int64_t begin, int64_t end);

} // namespace torch_sm3::reversible
