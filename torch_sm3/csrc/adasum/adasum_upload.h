// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Short lists on their way to a device.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace torch_sm3::distributed {

/// A list as a tensor on a device. Pinned before it goes to a GPU, because a
/// copy from pageable memory makes the host wait for the stream.
template <class T>
at::Tensor to_device(const std::vector<T>& values, const at::Device& device) {
  const at::Tensor host = at::empty(
      {static_cast<int64_t>(values.size())},
      at::TensorOptions()
          .dtype(c10::CppTypeToScalarType<T>::value)
          .pinned_memory(device.is_cuda()));
  std::copy(values.begin(), values.end(), host.mutable_data_ptr<T>());
  return host.to(device, /*non_blocking=*/true);
}

} // namespace torch_sm3::distributed
