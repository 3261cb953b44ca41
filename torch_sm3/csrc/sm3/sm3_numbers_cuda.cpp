// SPDX-License-Identifier: Apache-2.0
#include <scalar_kind.h>
#include <sm3_numbers_cuda.h>

namespace torch_sm3 {

void SM3DeviceNumbers::check(const char* name, const at::Tensor& tensor) const {
  TORCH_CHECK_VALUE(
      tensor.device() == device_,
      op_,
      ": expected a number on the CPU or on ",
      device_,
      ", but got ",
      tensor.device(),
      " (argument '",
      name,
      "')");
}

SM3Number SM3DeviceNumbers::of(
    const char* name,
    const std::optional<at::Tensor>& tensor,
    double otherwise) {
  if (!tensor) {
    return {nullptr, otherwise, ScalarKind::kFloat64};
  }
  if (tensor->is_cpu()) {
    return {nullptr, tensor->item().toDouble(), ScalarKind::kFloat64};
  }
  check(name, *tensor);
  at::Tensor number = *tensor;
  if (!has_scalar_kind(number.scalar_type())) {
    number = number.to(at::kDouble);
    converted_.push_back(number);
  }
  return {number.const_data_ptr(), 0.0, scalar_kind(number.scalar_type())};
}

} // namespace torch_sm3
