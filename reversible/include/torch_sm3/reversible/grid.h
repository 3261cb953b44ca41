// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Sums on a grid of steps 2^-bits, which round nothing and are therefore
/// undone exactly, while every number stays below 2^(24 - bits) in float32
/// and 2^(53 - bits) in float64.

#include <torch_sm3/export.h>

#include <ATen/core/Tensor.h>

#include <tuple>

namespace torch_sm3::reversible {

/// Returns the nearest numbers of the grid, ties to even; differentiable, the
/// gradient passes straight through.
///
/// Zeros lose their sign: sums could not give -0 back.
///
/// \param x    float32 or float64
/// \param bits from 0 to 23, or 52 for float64
TORCH_SM3_API at::Tensor reversible_quantize(const at::Tensor& x, int64_t bits);

/// Returns `acc + reversible_quantize(value)` and the largest magnitude of the
/// sums; differentiable.
///
/// The second tensor has no dimensions and the accumulator's dtype; it is
/// infinite if any sum is not finite. At 2^(24 - bits), or 2^(53 - bits), and
/// above the sums may have been rounded.
///
/// \param acc   float32 or float64, on the grid
/// \param value of the same shape and device; of another floating dtype, it is
///              cast first
/// \param bits  see reversible_quantize
TORCH_SM3_API std::tuple<at::Tensor, at::Tensor> reversible_grid_add(
    const at::Tensor& acc,
    const at::Tensor& value,
    int64_t bits);

/// Returns `acc - reversible_quantize(value)`, which undoes
/// reversible_grid_add; differentiable.
///
/// \param acc   see reversible_grid_add
/// \param value what was added
/// \param bits  see reversible_quantize
TORCH_SM3_API at::Tensor reversible_grid_sub(
    const at::Tensor& acc,
    const at::Tensor& value,
    int64_t bits);

} // namespace torch_sm3::reversible
