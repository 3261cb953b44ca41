// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <checksum_kernel.h>

#include <ATen/core/Tensor.h>

namespace torch_sm3::reversible {

/// NotImplementedError for a tensor without strides.
void check_checksum(const at::Tensor& x);

/// The tensor's elements in logical order, and the kernel's view of them.
struct ChecksumLayout {
  at::Tensor elements;
  Checksum checksum;
};

ChecksumLayout checksum_layout(const at::Tensor& x);

} // namespace torch_sm3::reversible
