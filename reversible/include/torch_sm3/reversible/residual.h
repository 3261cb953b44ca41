// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>

#include <ATen/core/Tensor.h>

namespace torch_sm3::reversible {

/// Returns `acc + value` in the accumulator's dtype; differentiable.
///
/// A value of another floating dtype is cast on the sum, and its gradient is
/// cast back. Nothing is broadcast.
///
/// \param acc   accumulator: float16, bfloat16, float32, float64 or complex
/// \param value what is added: of the same shape and device
TORCH_SM3_API at::Tensor
reversible_add(const at::Tensor& acc, const at::Tensor& value);

/// Returns `acc - value` in the accumulator's dtype; see reversible_add.
///
/// \param acc   accumulator
/// \param value what is subtracted
TORCH_SM3_API at::Tensor
reversible_sub(const at::Tensor& acc, const at::Tensor& value);

} // namespace torch_sm3::reversible
