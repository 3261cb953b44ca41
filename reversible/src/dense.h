// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Between tensors of any strides and the flat memory that kernels take.

#include <ATen/core/Tensor.h>

namespace torch_sm3::reversible {

/// Elements below which another thread costs more than it saves, as in ATen.
inline constexpr int64_t kGrain = 32768;

/// The tensor, or a copy of it, with the strides of a dense one.
/// \param like of the same shape, without gaps or overlap
/// \param type dtype of the result
at::Tensor laid_out_as(
    const at::Tensor& like,
    const at::Tensor& tensor,
    at::ScalarType type);

/// In the tensor's own dtype.
at::Tensor laid_out_as(const at::Tensor& like, const at::Tensor& tensor);

/// NotImplementedError unless the tensor is strided.
void check_strided(
    const char* op,
    const char* argument,
    const at::Tensor& tensor);

/// TypeError unless the tensor is float16, bfloat16, float32 or float64.
void check_real(const char* op, const char* argument, const at::Tensor& tensor);

/// ValueError unless the tensor has the shape and the device of `like`.
void check_like(
    const char* op,
    const char* argument,
    const at::Tensor& tensor,
    const at::Tensor& like);

} // namespace torch_sm3::reversible
