// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sm3_face.h>

#include <ATen/ops/zeros.h>

#include <unordered_map>

namespace torch_sm3::optim {

/// What the optimizer holds besides groups and state.
struct SM3::Extras {
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> found_inf;
  at::Tensor skipped = at::zeros({}, at::kLong);
  std::unordered_map<void*, ShapeHint> hints;

  /// Null for a parameter that is a whole.
  const ShapeHint* hint_of(const at::Tensor& param) const;
  /// One per parameter, in the order of the groups.
  std::vector<Slot> slots(SM3& optimizer) const;
};

} // namespace torch_sm3::optim
