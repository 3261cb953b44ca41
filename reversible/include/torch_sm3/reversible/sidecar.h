// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Corrections that turn a stream rebuilt in floating point into the original,
/// bit for bit, in about two bits an element.

#include <torch_sm3/export.h>

#include <ATen/core/Tensor.h>

#include <tuple>

namespace torch_sm3::reversible {

/// Returns what reversible_sidecar_decode needs to make `x` of `estimate`.
///
/// The tensors are `codes` (uint8, four 2-bit codes in each), `bytes` (int8
/// [byte_capacity]), `wide` (integers of the elements' width
/// [wide_capacity]), `offsets` (int64 [tiles of 4096 elements, 2]) and `used`
/// (int64 [2]): how many bytes and wide numbers there are. If that is more than
/// there is room for, the sidecar is not valid. What lies behind them is zero
/// and may be cut off.
///
/// Elements are taken in the order of memory of a dense tensor like `x`.
/// Nothing is differentiable.
///
/// \param x             float16, bfloat16, float32 or float64
/// \param estimate      of the same dtype, shape and device
/// \param byte_capacity room for differences that are not 0, +1 or -1
/// \param wide_capacity room for those that do not fit in a byte
TORCH_SM3_API
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>
reversible_sidecar_encode(
    const at::Tensor& x,
    const at::Tensor& estimate,
    int64_t byte_capacity,
    int64_t wide_capacity);

/// Returns the tensor that was encoded, every bit pattern as it was.
///
/// \param estimate the same bits as at the encoding, laid out as `x` was
/// \param codes    of reversible_sidecar_encode, as all that follow
/// \param bytes    at least the used ones
/// \param wide     at least the used ones
/// \param offsets  where each tile's escapes begin
TORCH_SM3_API at::Tensor reversible_sidecar_decode(
    const at::Tensor& estimate,
    const at::Tensor& codes,
    const at::Tensor& bytes,
    const at::Tensor& wide,
    const at::Tensor& offsets);

} // namespace torch_sm3::reversible
