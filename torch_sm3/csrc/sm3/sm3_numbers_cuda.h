// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Tensors of one number, as CUDA kernels read them.

#include <sm3_device.h>

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace torch_sm3 {

/// Numbers of one call. Those on the device are not read here.
class SM3DeviceNumbers {
 public:
  SM3DeviceNumbers(const char* op, at::Device device)
      : op_(op), device_(device) {}

  /// \param otherwise what it is without a tensor
  SM3Number
  of(const char* name,
     const std::optional<at::Tensor>& tensor,
     double otherwise);
  /// Throws if a tensor is on another device.
  void check(const char* name, const at::Tensor& tensor) const;

 private:
  const char* op_;
  at::Device device_;
  std::vector<at::Tensor> converted_; // kernels read them later
};

} // namespace torch_sm3
