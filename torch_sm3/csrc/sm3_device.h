// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// One parameter as the CUDA kernels of SM3 take it, and their tile sizes.

#include <cstdint>

namespace torch_sm3 {

constexpr int kSM3MaxDims = 16;
constexpr int kSM3Threads = 256; // a block's columns
constexpr int kSM3Rows = 32;     // a block's rows
constexpr int kSM3Warp = 32;

/// One parameter on the device.
template <class C>
struct SM3DeviceTensor {
  void* param;
  const void* grad;
  void* momentum;  ///< null without momentum
  int64_t rows;    ///< product of all sizes but the last
  int64_t columns; ///< the last size
  int dims;
  int64_t sizes[kSM3MaxDims];
  int64_t param_strides[kSM3MaxDims];
  int64_t grad_strides[kSM3MaxDims];
  int64_t momentum_strides[kSM3MaxDims];
  const C* old_numbers[kSM3MaxDims]; ///< accumulators, one per dimension
  C* new_numbers[kSM3MaxDims];       ///< zeros at first; unused if diagonal
  C* diagonal;                       ///< the accumulator of full size, or null
};

} // namespace torch_sm3
