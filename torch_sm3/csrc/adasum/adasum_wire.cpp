// SPDX-License-Identifier: Apache-2.0
#include "adasum_wire.h"

namespace torch_sm3::distributed {
namespace {

constexpr int64_t kScaleBytes = 8;

int64_t padded(int64_t bytes) {
  return (bytes + kScaleBytes - 1) / kScaleBytes * kScaleBytes;
}

} // namespace

Wire::Wire(c10::ScalarType dtype, std::optional<c10::ScalarType> code)
    : dtype_(dtype), coded_(code.has_value() && c10::elementSize(dtype) > 2) {
  if (coded_) {
    dtype_ = *code;
  }
}

int64_t Wire::bytes(const Layout& layout, Range tiles) const {
  const int64_t data = layout.elements_of(tiles).size() *
                       static_cast<int64_t>(c10::elementSize(dtype_));
  if (!coded_ || dtype_ != at::kHalf) {
    return data;
  }
  return padded(data) + tiles.size() * kScaleBytes;
}

Coded Wire::view(const Layout& layout, Range tiles, const at::Tensor& message)
    const {
  const int64_t data = layout.elements_of(tiles).size() *
                       static_cast<int64_t>(c10::elementSize(dtype_));
  Coded coded{message.narrow(0, 0, data).view(dtype_), {}};
  if (coded_ && dtype_ == at::kHalf) {
    coded.scales = message.narrow(0, padded(data), tiles.size() * kScaleBytes)
                       .view(at::kDouble);
  }
  return coded;
}

} // namespace torch_sm3::distributed
