// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <function.h>
#include <torch_sm3/reversible/module_function.h>

#include <memory>

namespace torch_sm3::reversible {

/// A torch::nn module as a function that is run twice.
///
/// \param summed of how many first arguments F takes the sum; 1 for each alone
std::shared_ptr<const Function>
nn_function(const ModuleFunction& f, size_t summed = 1);

} // namespace torch_sm3::reversible
