// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <half.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_sm3::reversible {

/// F's second run.
struct Recomputed {
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> inputs; ///< in the order of the node's inputs
};

/// Returns F's vector-Jacobian product, undefined where no gradient is needed.
///
/// Hooks of the tensors that F owns are left to the outer backward pass, where
/// they fire once.
///
/// \param grads of the values
/// \param needs which inputs' gradients are needed
std::vector<at::Tensor>
vjp(const Record& record,
    const Recomputed& run,
    const std::vector<at::Tensor>& grads,
    const std::vector<bool>& needs);

} // namespace torch_sm3::reversible
