// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>

#include <ATen/core/Tensor.h>

namespace torch_sm3::reversible {

/// Returns a 64-bit checksum of the elements' bits and order, as an int64
/// without dimensions: the same for any strides, number of threads and device.
///
/// \param x any dtype; a complex number counts as two elements
TORCH_SM3_API at::Tensor reversible_checksum(const at::Tensor& x);

} // namespace torch_sm3::reversible
