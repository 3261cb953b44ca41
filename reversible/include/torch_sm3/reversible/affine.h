// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The affine coupling of one half: `out = acc * exp(s) + shift` with
/// `s = clamp * tanh(scale / clamp)`, its inverse and its gradients.
///
/// Arithmetic is in float32, for a float64 accumulator in float64; the result
/// is rounded once and has the same bits on every machine.

#include <torch_sm3/export.h>

#include <ATen/core/Tensor.h>

#include <tuple>

namespace torch_sm3::reversible {

/// Returns `acc * exp(s) + shift` in the accumulator's dtype; differentiable.
///
/// \param acc   float16, bfloat16, float32 or float64
/// \param scale of the same shape and device; any of these dtypes
/// \param shift as scale
/// \param clamp bound of |s|, > 0
TORCH_SM3_API at::Tensor reversible_affine(
    const at::Tensor& acc,
    const at::Tensor& scale,
    const at::Tensor& shift,
    double clamp);

/// Returns `(out - shift) * exp(-s)`, the accumulator that gave `out`;
/// differentiable.
///
/// \param out   result of reversible_affine
/// \param scale see reversible_affine
/// \param shift see reversible_affine
/// \param clamp see reversible_affine
TORCH_SM3_API at::Tensor reversible_affine_inverse(
    const at::Tensor& out,
    const at::Tensor& scale,
    const at::Tensor& shift,
    double clamp);

/// Returns the gradients of reversible_affine by `acc` and by `scale`, each in
/// the dtype of its tensor: `grad * exp(s)` and
/// `grad * acc * exp(s) * (1 - tanh(scale / clamp)^2)`; differentiable.
///
/// \param grad  gradient of the result
/// \param acc   see reversible_affine
/// \param scale see reversible_affine
/// \param clamp see reversible_affine
TORCH_SM3_API std::tuple<at::Tensor, at::Tensor> reversible_affine_backward(
    const at::Tensor& grad,
    const at::Tensor& acc,
    const at::Tensor& scale,
    double clamp);

} // namespace torch_sm3::reversible
