// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Masks in an eighth of their memory.

#include <ATen/core/Tensor.h>

namespace torch_sm3::reversible {

/// Returns the bits of a bool tensor, eight to a byte, in logical order.
at::Tensor pack_bits(const at::Tensor& mask);

/// Returns the bool tensor of packed bits.
///
/// \param packed  what `pack_bits` returned
/// \param sizes   shape of the mask
/// \param strides its strides; kept where they are dense
at::Tensor unpack_bits(
    const at::Tensor& packed,
    at::IntArrayRef sizes,
    at::IntArrayRef strides);

} // namespace torch_sm3::reversible
