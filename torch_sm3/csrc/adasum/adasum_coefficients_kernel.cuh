// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The coefficients of Adasum on the device: one thread per layer.

#include "adasum_coefficients_kernel.h"

#include <cstdint>

namespace torch_sm3::distributed::cuda {

inline constexpr int kCoefficientThreads = 64;

__global__ void coefficients(LayerTable table) {
  const int64_t layer =
      static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (layer < table.layers) {
    coefficients_of_layer(table, layer);
  }
}

} // namespace torch_sm3::distributed::cuda
