// SPDX-License-Identifier: Apache-2.0
// Frees the memory of a stage's outputs that have been sent.
#include <backward/parts.h>
#include <backward/state.h>

#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <limits>
#include <unordered_set>

namespace torch_sm3::pipeline {
namespace {

using Edges = std::unordered_set<Edge>;

// Which outputs have a use in the graph of the others: the node there may have
// saved the tensor itself. Nodes that no output leads to do not matter; they
// never run.
Edges used_among(const edge_list& outputs) {
  Edges candidates;
  std::vector<const Node*> stack;
  for (const Edge& edge : outputs) {
    if (edge.is_valid() && candidates.insert(edge).second) {
      stack.push_back(edge.function.get());
    }
  }
  Edges used;
  if (candidates.size() < 2) {
    return used;
  }
  std::unordered_set<const Node*> seen(stack.begin(), stack.end());
  while (!stack.empty()) {
    const Node* node = stack.back();
    stack.pop_back();
    for (const Edge& edge : node->next_edges()) {
      if (!edge.is_valid()) {
        continue;
      }
      if (candidates.contains(edge)) {
        used.insert(edge);
      }
      if (seen.insert(edge.function.get()).second) {
        stack.push_back(edge.function.get());
      }
    }
  }
  return used;
}

bool has_nan(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf ||
         type == at::kBFloat16 || at::isComplexType(type);
}

// Only a tensor of this kind can change its storage with nobody noticing.
bool is_plain(const at::Tensor& output) {
  return output.defined() && output.layout() == at::kStrided &&
         output.has_storage() && has_nan(output.scalar_type()) &&
         !output.unsafeGetTensorImpl()->is_python_dispatch() &&
         !output.is_view();
}

// Another holder of the tensor, such as a module that keeps its last output,
// finds a tensor of the same shape that cannot be mistaken for the values.
void put_one_element(const at::Tensor& output) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor element =
      at::full({1}, std::numeric_limits<double>::quiet_NaN(), output.options());
  output.set_data(element.expand_symint(output.sym_sizes()));
}

} // namespace

std::vector<bool>
StageBackward::free(const std::vector<at::Tensor>& outputs) const {
  const State& state = *state_;
  expect_phase(
      state.phase == Phase::kLeft,
      "free between leave and the backward",
      "it at another time");
  const Edges used = used_among(state.outputs);
  const auto entered = [&](const at::Tensor& output) {
    const c10::StorageImpl* storage = output.storage().unsafeGetStorageImpl();
    return std::ranges::any_of(state.entered, [&](const auto& weak) {
      return weak._unsafe_get_target() == storage;
    });
  };
  std::vector<bool> freed;
  freed.reserve(outputs.size());
  for (const at::Tensor& output : outputs) {
    // A custom Function may hold its result by any means. What holds it as
    // torch's own nodes do survives, but then so do the bytes.
    freed.push_back(
        is_plain(output) && output.grad_fn() &&
        keeps_no_result(*output.grad_fn()) && !entered(output) &&
        !used.contains(Edge(output.grad_fn(), output.output_nr())));
    if (freed.back()) {
      put_one_element(output);
    }
  }
  return freed;
}

} // namespace torch_sm3::pipeline
