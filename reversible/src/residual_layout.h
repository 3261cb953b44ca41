// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Between tensors and the flat memory that the residual kernels take.

#include <residual_kernel.h>

#include <ATen/core/Tensor.h>

namespace torch_sm3::reversible {

/// Checks the arguments of `reversible_add` and `reversible_sub`.
/// \param op its name, for messages
void check_residual(
    const char* op,
    const at::Tensor& acc,
    const at::Tensor& value);

/// Tensors of one call, all dense and with equal strides, and the kernel's
/// view of them.
struct ResidualLayout {
  at::Tensor acc, value, out;
  Residual residual;
  int64_t count; ///< elements; two for each complex one
};

/// Allocates the result and copies arguments whose layout is another.
ResidualLayout
residual_layout(const at::Tensor& acc, const at::Tensor& value, bool subtract);

} // namespace torch_sm3::reversible
