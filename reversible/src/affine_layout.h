// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Between tensors and the flat memory that the affine kernels take.

#include <affine_kernel.h>

#include <ATen/core/Tensor.h>

#include <array>

namespace torch_sm3::reversible {

/// Checks the arguments of one of the three operators.
/// \param tensors in the order of its schema
void check_affine(
    AffineOp op,
    const std::array<at::Tensor, 3>& tensors,
    double clamp);

/// Tensors of one call, all dense and with equal strides, and the kernel's
/// view of them.
struct AffineLayout {
  std::array<at::Tensor, 3> in;
  std::array<at::Tensor, 2> out; ///< the second of kBackward only
  Affine affine;
  int64_t count;
};

/// Allocates the results and copies arguments whose layout is another.
AffineLayout affine_layout(
    AffineOp op,
    const std::array<at::Tensor, 3>& tensors,
    double clamp);

} // namespace torch_sm3::reversible
