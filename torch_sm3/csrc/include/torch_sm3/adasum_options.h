// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/adasum_mode.h>
#include <torch_sm3/export.h>

#include <c10/core/ScalarType.h>

#include <chrono>
#include <cstdint>
#include <optional>

namespace torch_sm3::distributed {

/// How gradients are combined; equal on all ranks, but for `threads`.
struct AdasumOptions {
  Mode mode = Mode::tree;
  Algorithm algorithm = Algorithm::automatic;
  /// Factor of the result.
  double scale = 1.0;
  /// Consecutive ranks that are combined first, by `inner`; 0: all at once. The
  /// last node may have fewer.
  int64_t node_size = 0;
  Inner inner = Inner::mean;
  /// float64, or float32 for devices with slow float64: in what the products of
  /// a block are added.
  c10::ScalarType accumulate_dtype = c10::ScalarType::Double;
  /// float16 or bfloat16: what travels where gradients are wider.
  std::optional<c10::ScalarType> wire_dtype;
  /// Limit of the memory beside the gradients.
  int64_t scratch_bytes = int64_t{64} << 20;
  /// Threads of the kernels, 0: as many as torch uses.
  int threads = 0;
  Check check = Check::layout;
  /// Longest wait for a message of another rank, 0: that of the group.
  std::chrono::milliseconds timeout{0};
};

} // namespace torch_sm3::distributed
