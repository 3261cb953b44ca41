// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_sm3::reversible {

/// Returns F's arguments behind one autograd node, so that the gradients that
/// one F gives to a tensor are summed before they meet those of others, as the
/// node of a half sums them. Undefined tensors stay undefined.
std::vector<at::Tensor> joined(const std::vector<at::Tensor>& arguments);

/// Whether a functorch transform, which our nodes do not know, is running.
bool in_functorch();

} // namespace torch_sm3::reversible
