// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// torch.classes.torch_sm3.AdasumPlan: options and layers of one kind of
/// bucket.

#include "adasum_plan.h"

#include <torch/custom_class.h>

#include <memory>
#include <string>

namespace torch_sm3::distributed {

/// Holds a plan, checked, with the words that error messages need.
struct PlanHolder : torch::CustomClassHolder {
  std::shared_ptr<const Plan> plan;
  std::string layers; ///< of `Plan::layers_in_words`
};

/// Registers the class; before that of the exchange, whose methods name it.
void register_plan(torch::Library& m);

} // namespace torch_sm3::distributed
