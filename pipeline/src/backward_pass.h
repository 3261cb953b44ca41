// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_sm3::pipeline {

// What a forward of one stage and microbatch leaves for its backward.
struct StageGraph {
  // Leaves behind the stage's inputs, undefined where none requires grad, with
  // the number of them that each way in brought.
  std::vector<at::Tensor> inputs;
  std::vector<size_t> inputs_of_edge;
  // Outputs, with the number of them that each way out takes.
  std::vector<at::Tensor> outputs;
  std::vector<size_t> outputs_of_edge;
  // Between I and W: the gradients of the outputs.
  std::vector<at::Tensor> gradients;
};

// Runs a full backward: adds to the weights' gradients and returns those of the
// inputs. Undefined gradients of outputs are skipped.
std::vector<at::Tensor>
run_backward(StageGraph& graph, const std::vector<at::Tensor>& gradients);

// Returns the gradients of the inputs only, and keeps the graph for W.
std::vector<at::Tensor>
run_backward_input(StageGraph& graph, const std::vector<at::Tensor>& gradients);

// Adds to the weights' gradients what `run_backward_input` left out.
void run_backward_weight(StageGraph& graph);

} // namespace torch_sm3::pipeline
