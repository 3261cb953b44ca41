// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Pieces of the tables that CUDA kernels of SM3 take.

#include <sm3_device.h>
#include <sm3_geometry.h>

#include <cstring>
#include <limits>
#include <vector>

namespace torch_sm3 {

/// Where the arrays of the tables begin: packs of 16 bytes are read from them.
constexpr int64_t kSM3Align = 16;

inline int64_t sm3_align(int64_t bytes) {
  return (bytes + kSM3Align - 1) / kSM3Align * kSM3Align;
}

inline int64_t sm3_ceiling(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// Bytes of an array in the tables.
template <class T>
int64_t sm3_bytes(const std::vector<T>& array) {
  return sm3_align(static_cast<int64_t>(array.size() * sizeof(T)));
}

/// Copies an array. \return where the next one goes
template <class T>
char* sm3_put(const std::vector<T>& array, char* to) {
  if (!array.empty()) {
    std::memcpy(to, array.data(), array.size() * sizeof(T));
  }
  return to + sm3_bytes(array);
}

/// The dimensions of a tensor, and its numbers if there are several.
inline SM3DeviceStrided
sm3_describe(const SM3Strided& tensor, std::vector<int64_t>& numbers) {
  SM3DeviceStrided t{};
  t.data = tensor.data;
  t.kind = tensor.kind;
  t.dims = static_cast<int16_t>(tensor.dims);
  t.shape = static_cast<int32_t>(numbers.size());
  if (tensor.dims > 0) {
    t.stride = tensor.strides[tensor.dims - 1];
  }
  if (tensor.dims > 1) {
    numbers.insert(numbers.end(), tensor.sizes, tensor.sizes + tensor.dims);
    numbers.insert(numbers.end(), tensor.strides, tensor.strides + tensor.dims);
  }
  return t;
}

inline SM3Tile sm3_tile(size_t tensor, int64_t number) {
  TORCH_INTERNAL_ASSERT(number <= std::numeric_limits<uint32_t>::max());
  return {static_cast<int32_t>(tensor), static_cast<uint32_t>(number)};
}

} // namespace torch_sm3
