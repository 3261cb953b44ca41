// SPDX-License-Identifier: Apache-2.0
#include <vjp.h>

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

namespace torch_sm3::reversible {
namespace {

using torch::autograd::tensor_list;

// Keeps the hooks of tensors for the outer backward pass, where they fire once.
class SuspendedHooks {
 public:
  explicit SuspendedHooks(at::TensorList tensors) {
    for (const at::Tensor& tensor : tensors) {
      auto& hooks = torch::autograd::impl::hooks(tensor);
      if (!hooks.empty()) {
        suspended_.emplace_back(tensor, std::move(hooks));
        hooks.clear();
      }
    }
  }
  ~SuspendedHooks() {
    for (auto& [tensor, hooks] : suspended_) {
      torch::autograd::impl::hooks(tensor) = std::move(hooks);
    }
  }
  SuspendedHooks(const SuspendedHooks&) = delete;
  SuspendedHooks& operator=(const SuspendedHooks&) = delete;

 private:
  using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;
  std::vector<std::pair<at::Tensor, Hooks>> suspended_;
};

// Searches F's graph, once, for tensors whose gradient would be lost.
void check_graph(const Record& record, const Recomputed& run) {
  Learned& learned = record.half.function->learned();
  if (learned.graph_checked) {
    return;
  }
  std::unordered_set<const void*> known, seen;
  for (const at::Tensor& input : run.inputs) {
    known.insert(input.unsafeGetTensorImpl());
    seen.insert(input.grad_fn().get());
  }
  std::vector<torch::autograd::Node*> todo;
  for (const at::Tensor& value : run.values) {
    todo.push_back(value.grad_fn().get());
  }
  while (!todo.empty()) {
    torch::autograd::Node* node = todo.back();
    todo.pop_back();
    if (node == nullptr || !seen.insert(node).second) {
      continue;
    }
    if (const auto* leaf =
            dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      TORCH_CHECK(
          known.contains(leaf->variable.unsafeGetTensorImpl()),
          "reversible: expected every tensor that F of ",
          record.half.name,
          " needs the gradient of to be an argument or an attribute of F, but "
          "got one of shape ",
          leaf->variable.sizes(),
          " from elsewhere (argument 'f')");
    }
    for (const auto& edge : node->next_edges()) {
      todo.push_back(edge.function.get());
    }
  }
  learned.graph_checked = true;
}

} // namespace

std::vector<at::Tensor>
vjp(const Record& record,
    const Recomputed& run,
    const std::vector<at::Tensor>& grads,
    const std::vector<bool>& needs) {
  tensor_list result(needs.size()), wanted, values, value_grads;
  for (size_t i = 0; i < needs.size(); ++i) {
    if (needs[i]) {
      wanted.push_back(run.inputs[i]);
    }
  }
  for (size_t i = 0; i < run.values.size(); ++i) {
    if (run.values[i].requires_grad()) {
      values.push_back(run.values[i]);
      value_grads.push_back(grads[i]);
    }
  }
  if (values.empty() || wanted.empty()) {
    return result;
  }
  check_graph(record, run);
  const SuspendedHooks suspended(record.replay->owned());
  tensor_list found = torch::autograd::grad(
      values,
      wanted,
      value_grads,
      /*retain_graph=*/false,
      /*create_graph=*/false,
      /*allow_unused=*/true);
  for (size_t i = 0, next = 0; i < needs.size(); ++i) {
    if (needs[i]) {
      result[i] = std::move(found[next++]);
    }
  }
  return result;
}

} // namespace torch_sm3::reversible
