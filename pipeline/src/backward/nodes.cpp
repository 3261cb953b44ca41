// SPDX-License-Identifier: Apache-2.0
#include <backward/nodes.h>

namespace torch_sm3::pipeline {

variable_list Entry::apply(variable_list&& grads) {
  gradients = std::move(grads);
  return {};
}

Partial::Partial(NodePtr of) : Node(of->sequence_nr()), node(std::move(of)) {
  for (uint32_t i = 0; i < node->num_inputs(); ++i) {
    input_metadata_.emplace_back(node->input_metadata(i));
  }
  // Hooks see a gradient once, and what they return is what is recorded.
  std::swap(tensor_pre_hooks(), node->tensor_pre_hooks());
  std::swap(retains_grad_hooks(), node->retains_grad_hooks());
  std::swap(pre_hooks(), node->pre_hooks());
}

variable_list Partial::apply(variable_list&& grads) {
  recorded = grads;
  return runs ? (*node)(std::move(grads)) : variable_list(num_outputs());
}

Edge Held::stand_in(const OwnerOf<Held>& self, Edge target) {
  const auto slot = static_cast<uint32_t>(targets_.size());
  input_metadata_.emplace_back(
      target.function->input_metadata(target.input_nr));
  targets_.push_back(std::move(target));
  return {self, slot};
}

void Held::turn() {
  next_edges() = std::move(targets_);
  gradients_.resize(num_outputs());
  set_sequence_nr(place_);
}

variable_list Held::apply(variable_list&& grads) {
  if (num_outputs() != 0) {
    return std::move(gradients_);
  }
  gradients_ = std::move(grads);
  return {};
}

Gate::Gate(edge_list edges, variable_list gradients, const at::Tensor& ticket)
    : Node(std::move(edges)), gradients_(std::move(gradients)) {
  add_input_metadata(ticket);
}

variable_list Gate::apply(variable_list&& /*grads*/) {
  return std::move(gradients_);
}

} // namespace torch_sm3::pipeline
