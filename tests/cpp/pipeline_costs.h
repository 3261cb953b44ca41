// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/costs.h>

namespace torch_sm3::pipeline {

// Costs of stages that are alike and keep one byte each.
inline Costs stage_costs(double forward, double input, double weight) {
  Costs costs;
  costs.stages[0].forward = forward;
  costs.stages[0].input = input;
  costs.stages[0].weight = weight;
  costs.stages[0].activation_bytes = 1;
  return costs;
}

} // namespace torch_sm3::pipeline
