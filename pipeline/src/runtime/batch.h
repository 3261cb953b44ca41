// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/runtime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

// CutValue of a value, and the number of samples in each (0 without tensors).
struct CutValue {
  std::vector<c10::IValue> values;
  std::vector<int64_t> sizes;
};

// Cuts the tensors of a value along `dim` into parts as even as possible: 8 in
// 3 gives 3, 3, 2. A ValueError names `argument`.
CutValue
cut(const c10::IValue& value,
    int64_t parts,
    int64_t dim,
    const std::string& argument);

// The factor of each microbatch's loss in the loss of the step.
std::vector<double>
loss_weights(LossReduction reduction, const std::vector<int64_t>& sizes);

// What the last stage makes of the microbatches of one step.
struct Batch {
  std::vector<c10::IValue> inputs;  // tuples of arguments, by microbatch
  std::vector<c10::IValue> targets; // empty: no loss
  std::vector<double> weights;
  bool keep = false;
  std::vector<at::Tensor> losses;
  std::vector<c10::IValue> outputs;
};

// The loss of the step and those of its microbatches; undefined if there are
// none. Added in microbatch order, so that the bits do not depend on the ranks.
std::pair<at::Tensor, at::Tensor> reduced(const Batch& batch);

} // namespace torch_sm3::pipeline
