// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Between tensors and the flat memory that the dropout kernels take.

#include <dropout_kernel.h>

#include <ATen/core/Tensor.h>

namespace torch_sm3::reversible {

at::OptionalSymIntArrayRef as_symbols(at::OptionalIntArrayRef strides);

/// Checks the arguments of `reversible_dropout`.
void check_dropout(
    const at::Tensor& x,
    double p,
    const at::Tensor& seed,
    const c10::SymInt& offset,
    at::OptionalSymIntArrayRef strides);

/// Tensors of one call with equal strides, and the kernel's view of them.
struct DropoutLayout {
  at::Tensor x, out;
  Dropout dropout;
  int64_t count;
};

/// Allocates the result.
DropoutLayout dropout_layout(
    const at::Tensor& x,
    double p,
    int64_t offset,
    at::OptionalIntArrayRef strides);

} // namespace torch_sm3::reversible
