// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Between tensors and the flat memory that the grid kernels take.

#include <grid_kernel.h>

#include <ATen/core/Tensor.h>

namespace torch_sm3::reversible {

/// Checks the argument of `reversible_quantize`.
void check_quantize(const at::Tensor& x, int64_t bits);

/// Checks the arguments of `reversible_grid_add` and `reversible_grid_sub`.
/// \param op its name, for messages
void check_grid(
    const char* op,
    const at::Tensor& acc,
    const at::Tensor& value,
    int64_t bits);

/// Tensors of one call, all dense and with equal strides, and the kernel's
/// view of them.
struct GridLayout {
  at::Tensor acc, value, out;
  GridSum sum;
  int64_t count;
};

/// Allocates the result and copies arguments whose layout is another.
/// \param acc undefined for GridOp::kQuantize
GridLayout grid_layout(
    GridOp op,
    const at::Tensor& acc,
    const at::Tensor& value,
    int64_t bits);

} // namespace torch_sm3::reversible
