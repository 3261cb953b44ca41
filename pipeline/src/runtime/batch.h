// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/runtime.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_sm3::pipeline {

// Parts of a value, and the number of samples in each (0 without tensors).
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

// Number of samples of a value along `dim`; a ValueError names `argument`.
int64_t
samples_of(const c10::IValue& value, int64_t dim, const std::string& argument);

// What the last stage makes of the microbatches of one step.
struct Batch {
  std::vector<c10::IValue> inputs;  // tuples of arguments, by microbatch
  std::vector<c10::IValue> targets; // empty: no loss
  std::vector<double> weights;
  bool keep = false;
  std::vector<at::Tensor> losses;
  std::vector<double> counts; // of tokens
  std::vector<c10::IValue> metrics;
  std::vector<c10::IValue> outputs;
};

// Notes what the user's loss returned for a microbatch and returns the loss. A
// TypeError if it returned something else than it should.
at::Tensor
take_loss(LossReduction reduction, const c10::IValue& result, Batch* batch);

// What gradients are still to be divided by, if by anything.
std::optional<double> divisor(LossReduction reduction, const Batch& batch);

// The loss of the step and those of its microbatches; undefined if there are
// none. Added in microbatch order, so that the bits do not depend on the ranks.
std::pair<at::Tensor, at::Tensor>
reduced(const Batch& batch, const std::optional<double>& total);

} // namespace torch_sm3::pipeline
