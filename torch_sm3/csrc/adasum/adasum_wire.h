// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// How runs of tiles travel: as they are, or as 16-bit numbers.
///
/// A coded message holds the numbers, padded to 8 bytes, then (float16) one
/// float64 power of two per tile.

#include "adasum_compute.h"

#include <cstdint>
#include <optional>

namespace torch_sm3::distributed {

/// Messages begin at multiples of this in a buffer.
inline constexpr int64_t kAlignment = 64;

inline int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// The format of one kind of message.
class Wire {
 public:
  /// \param dtype of the tensors that travel
  /// \param code  16-bit type; taken only where `dtype` is wider
  Wire(c10::ScalarType dtype, std::optional<c10::ScalarType> code);

  bool coded() const {
    return coded_;
  }
  /// Of what the numbers of a message are.
  c10::ScalarType dtype() const {
    return dtype_;
  }
  /// Size of a message.
  int64_t bytes(const Layout& layout, Range tiles) const;
  /// Numbers and powers of two of a message of `bytes(...)`.
  Coded
  view(const Layout& layout, Range tiles, const at::Tensor& message) const;

 private:
  c10::ScalarType dtype_;
  bool coded_;
};

} // namespace torch_sm3::distributed
