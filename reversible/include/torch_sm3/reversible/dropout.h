// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>

#include <ATen/core/Tensor.h>

namespace torch_sm3::reversible {

/// Returns `x` with elements set to zero with probability `p` and the others
/// times 1 / (1 - p); differentiable.
///
/// Which elements are dropped is a function of the seed and of a number of each
/// element alone, and of no generator: word `n & 3` of the Philox-4x32-10 block
/// `n >> 2`, whose key is the seed, is compared with `p * 2^32`. Parts of a
/// tensor, given the whole tensor's strides and their own offset, are dropped
/// as in the whole.
///
/// \param x       float16, bfloat16, float32 or float64
/// \param p       from 0 to 1
/// \param seed    one int64 on the device of `x`
/// \param offset  number n of the first element, >= 0
/// \param strides what n grows by in each dimension; without it, by those of a
///                contiguous tensor of x's shape
TORCH_SM3_API at::Tensor reversible_dropout(
    const at::Tensor& x,
    double p,
    const at::Tensor& seed,
    int64_t offset = 0,
    at::OptionalIntArrayRef strides = std::nullopt);

} // namespace torch_sm3::reversible
