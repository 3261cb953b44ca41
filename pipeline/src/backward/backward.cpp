// SPDX-License-Identifier: Apache-2.0
#include <backward/state.h>
#include <torch_sm3/check.h>
#include <torch_sm3/pipeline/backward.h>

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace torch_sm3::pipeline {

Split split_of(const std::string& name) {
  TORCH_SM3_CHECK_VALUE(
      name == "auto" || name == "always" || name == "never",
      "PipelineBackward",
      "split",
      "'auto', 'always' or 'never'",
      c10::str("'", name, "'"));
  return name == "auto"    ? Split::kAuto
         : name == "never" ? Split::kNever
                           : Split::kAlways;
}

// The outputs whose gradient arrived and that have a graph.
std::pair<edge_list, variable_list>
StageBackward::State::roots(const std::vector<at::Tensor>& gradients) const {
  TORCH_SM3_CHECK_VALUE(
      gradients.size() == outputs.size(),
      "PipelineBackward",
      "gradients",
      c10::str(outputs.size(), " gradients, one for each output"),
      gradients.size());
  std::pair<edge_list, variable_list> roots;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& gradient = gradients[i];
    if (!gradient.defined() || !outputs[i].is_valid()) {
      continue;
    }
    const auto& meta = outputs[i].function->input_metadata(outputs[i].input_nr);
    TORCH_SM3_CHECK_VALUE(
        meta.is_same_shape(gradient),
        "PipelineBackward",
        "gradients",
        c10::str(
            "a gradient of shape ",
            meta.shape_as_dim_vector(),
            " for output ",
            i),
        gradient.sizes());
    roots.first.push_back(outputs[i]);
    roots.second.push_back(gradient);
  }
  return roots;
}

std::vector<at::Tensor> StageBackward::State::input_gradients() {
  std::vector<at::Tensor> found(arguments);
  if (entry) {
    entry->gradients.resize(tracked.size());
    for (size_t i = 0; i < tracked.size(); ++i) {
      found[tracked[i]] = std::move(entry->gradients[i]);
    }
    entry->gradients.clear();
  }
  return found;
}

StageBackward::StageBackward() : state_(std::make_unique<State>()) {}
StageBackward::~StageBackward() = default;
StageBackward::StageBackward(StageBackward&&) noexcept = default;
StageBackward& StageBackward::operator=(StageBackward&&) noexcept = default;

std::vector<at::Tensor> StageBackward::enter(
    const std::vector<at::Tensor>& tensors,
    const std::vector<bool>& requires_grad) {
  State& state = *state_;
  expect_phase(
      state.phase == Phase::kForward && state.arguments == 0,
      "one call of enter, before leave",
      "another");
  TORCH_SM3_CHECK_VALUE(
      requires_grad.size() == tensors.size(),
      "PipelineBackward",
      "requires_grad",
      c10::str(tensors.size(), " flags, one for each tensor"),
      requires_grad.size());
  state.arguments = tensors.size();
  std::vector<at::Tensor> given = tensors;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].has_storage()) {
      state.entered.emplace_back(tensors[i].storage().getWeakStorageImpl());
    }
    if (requires_grad[i]) {
      if (!state.entry) {
        state.entry = make_node<Entry>();
      }
      const uint32_t slot = state.entry->add_input_metadata(tensors[i]);
      given[i] =
          torch::autograd::make_variable(tensors[i], Edge(state.entry, slot));
      state.tracked.push_back(i);
    }
  }
  return given;
}

void StageBackward::leave(const std::vector<at::Tensor>& outputs) {
  State& state = *state_;
  expect_phase(state.phase == Phase::kForward, "one call of leave", "another");
  state.phase = Phase::kLeft;
  state.outputs.reserve(outputs.size());
  for (const at::Tensor& output : outputs) {
    state.outputs.push_back(
        output.defined() && output.requires_grad()
            ? torch::autograd::impl::gradient_edge(output)
            : Edge());
  }
}

std::vector<at::Tensor>
StageBackward::full(const std::vector<at::Tensor>& gradients) {
  State& state = *state_;
  expect_phase(
      state.phase == Phase::kLeft,
      "full after leave, once",
      "it at another time");
  {
    const auto [roots, grads] = state.roots(gradients);
    state.phase = Phase::kDone;
    state.outputs.clear();
    run_engine(roots, grads);
  }
  return state.input_gradients();
}

std::vector<at::Tensor>
StageBackward::input(const std::vector<at::Tensor>& gradients, Split split) {
  State& state = *state_;
  expect_phase(
      state.phase == Phase::kLeft,
      "input after leave, once",
      "it at another time");
  if (split == Split::kNever) {
    auto found = full(gradients);
    state.phase = Phase::kInputDone;
    return found;
  }
  {
    auto [roots, grads] = state.roots(gradients);
    state.phase = Phase::kInputDone;
    state.outputs.clear();
    Cut cut(roots, grads, state.entry.get());
    if (cut.splits()) {
      roots.clear();
      grads.clear();
      state.owed = cut.run();
    } else {
      TORCH_SM3_CHECK_VALUE(
          split == Split::kAuto || roots.empty(),
          "PipelineBackward",
          "split",
          "a stage whose backward can be split",
          "one where no layer that can be run in parts owns a weight that "
          "requires grad");
      run_engine(roots, grads);
    }
  }
  return state.input_gradients();
}

void StageBackward::weight() {
  State& state = *state_;
  expect_phase(
      state.phase == Phase::kInputDone,
      "weight after input, once",
      "it at another time");
  state.phase = Phase::kDone;
  Owed owed = std::exchange(state.owed, {});
  if (owed.empty()) {
    return;
  }
  at::TensorOptions options;
  for (const at::Tensor& gradient : owed.gradients) {
    if (gradient.defined()) {
      options = gradient.options().layout(at::kStrided);
      break;
    }
  }
  const at::Tensor ticket = at::empty({0}, options);
  const auto gate =
      make_node<Gate>(std::move(owed.edges), std::move(owed.gradients), ticket);
  run_engine({Edge(gate, 0)}, {ticket});
}

bool StageBackward::owes_weight() const {
  return !state_->owed.empty();
}

} // namespace torch_sm3::pipeline
