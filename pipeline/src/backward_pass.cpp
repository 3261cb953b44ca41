// SPDX-License-Identifier: Apache-2.0
#include <backward_pass.h>

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

namespace torch_sm3::pipeline {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using Tensors = std::vector<at::Tensor>;

// The casts of the forward are recorded; a backward makes no new ones.
class NoAutocast {
 public:
  NoAutocast() : was_(at::autocast::is_autocast_enabled(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  ~NoAutocast() {
    at::autocast::set_autocast_enabled(at::kCPU, was_);
  }
  NoAutocast(const NoAutocast&) = delete;
  NoAutocast& operator=(const NoAutocast&) = delete;

 private:
  const bool was_;
};

// Outputs whose gradient arrived and is wanted, and these gradients.
std::pair<Tensors, Tensors>
roots(const Tensors& outputs, const Tensors& grads) {
  std::pair<Tensors, Tensors> found;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (grads[i].defined() && outputs[i].requires_grad()) {
      found.first.push_back(outputs[i]);
      found.second.push_back(grads[i]);
    }
  }
  return found;
}

Tensors defined(const Tensors& tensors) {
  Tensors found;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) {
      found.push_back(tensor);
    }
  }
  return found;
}

// The leaves that a backward from `outputs` reaches, but for `inputs`.
Tensors weights_of(const Tensors& outputs, const Tensors& inputs) {
  std::unordered_set<const c10::TensorImpl*> own;
  for (const at::Tensor& input : inputs) {
    own.insert(input.unsafeGetTensorImpl());
  }
  Tensors weights;
  std::unordered_set<Node*> seen;
  std::vector<Node*> stack;
  const auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) {
      stack.push_back(node);
    }
  };
  for (const at::Tensor& output : outputs) {
    visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!stack.empty()) {
    Node* node = stack.back();
    stack.pop_back();
    if (auto* leaf = dynamic_cast<AccumulateGrad*>(node)) {
      if (own.count(leaf->variable.unsafeGetTensorImpl()) == 0) {
        weights.push_back(leaf->variable);
      }
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      visit(edge.function.get());
    }
  }
  return weights;
}

} // namespace

Tensors run_backward(StageGraph& graph, const Tensors& gradients) {
  const auto [outputs, grads] = roots(graph.outputs, gradients);
  if (!outputs.empty()) {
    const NoAutocast no_autocast;
    torch::autograd::backward(outputs, grads);
  }
  Tensors found;
  for (const at::Tensor& input : graph.inputs) {
    found.push_back(input.defined() ? input.grad() : at::Tensor());
  }
  return found;
}

Tensors run_backward_input(StageGraph& graph, const Tensors& gradients) {
  graph.gradients = gradients;
  const auto [outputs, grads] = roots(graph.outputs, gradients);
  const Tensors wanted = defined(graph.inputs);
  Tensors made(wanted.size());
  if (!outputs.empty() && !wanted.empty()) {
    const NoAutocast no_autocast;
    made = torch::autograd::grad(
        outputs,
        wanted,
        grads,
        /*retain_graph=*/true,
        /*create_graph=*/false,
        /*allow_unused=*/true);
  }
  Tensors found;
  auto next = made.begin();
  for (const at::Tensor& input : graph.inputs) {
    found.push_back(input.defined() ? *next++ : at::Tensor());
  }
  return found;
}

void run_backward_weight(StageGraph& graph) {
  const auto [outputs, grads] = roots(graph.outputs, graph.gradients);
  const Tensors weights = weights_of(outputs, defined(graph.inputs));
  if (!weights.empty()) {
    const NoAutocast no_autocast;
    torch::autograd::backward(
        outputs,
        grads,
        /*retain_graph=*/false,
        /*create_graph=*/false,
        weights);
  }
}

} // namespace torch_sm3::pipeline
