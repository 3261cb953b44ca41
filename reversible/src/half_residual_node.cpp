// SPDX-License-Identifier: Apache-2.0
#include <call_state.h>
#include <torch_sm3/reversible/residual.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace torch_sm3::reversible {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

struct Shared : torch::CustomClassHolder {
  std::shared_ptr<CallState> state;
  Record* record = nullptr;
};

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

struct Recomputed {
  at::Tensor value;
  tensor_list inputs; // in the order of the node's inputs
};

// Runs F with grad at the rebuilt inputs.
Recomputed recompute(
    const Record& record,
    const Cursor& cursor,
    const std::vector<bool>& needs) {
  Recomputed result;
  const auto track = [&](const at::Tensor& tensor) {
    at::Tensor leaf = tensor.detach();
    leaf.set_requires_grad(needs[result.inputs.size()]);
    result.inputs.push_back(leaf);
    return leaf;
  };
  const c10::AutoGradMode grad(true);
  std::vector<at::Tensor> context;
  context.reserve(record.reads.size());
  for (const size_t i : record.reads) {
    context.push_back(track(cursor.streams[i]));
  }
  std::vector<at::Tensor> side = cursor.side;
  for (const auto& place : record.side) {
    // A tensor that F is given twice is one input.
    if (place && side[*place].is_same(cursor.side[*place])) {
      side[*place] = track(cursor.side[*place]);
    }
  }
  result.value = record.replay.again(
      [&] { return record.f(arguments_of(record, context, side)); });
  const auto& owned = record.replay.owned();
  result.inputs.insert(result.inputs.end(), owned.begin(), owned.end());
  return result;
}

// F's vector-Jacobian product; undefined where no gradient is needed.
tensor_list
vjp(const Recomputed& run,
    const Record& record,
    const at::Tensor& grad,
    const std::vector<bool>& needs) {
  tensor_list grads(needs.size()), wanted;
  for (size_t i = 0; i < needs.size(); ++i) {
    if (needs[i]) {
      wanted.push_back(run.inputs[i]);
    }
  }
  if (!grad.defined() || !run.value.requires_grad() || wanted.empty()) {
    return grads;
  }
  const SuspendedHooks suspended(record.replay.owned());
  tensor_list found = torch::autograd::grad(
      {run.value},
      wanted,
      {grad.to(run.value.scalar_type())},
      /*retain_graph=*/false,
      /*create_graph=*/false,
      /*allow_unused=*/true);
  for (size_t i = 0, next = 0; i < needs.size(); ++i) {
    if (needs[i]) {
      grads[i] = std::move(found[next++]);
    }
  }
  return grads;
}

struct HalfResidualNode : torch::autograd::Function<HalfResidualNode> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const std::shared_ptr<CallState>& state,
      Record* record,
      const at::Tensor& value,
      const at::Tensor& acc,
      at::TensorList inputs) {
    auto shared = c10::make_intrusive<Shared>();
    shared->state = state;
    shared->record = record;
    ctx->saved_data["shared"] = c10::IValue::make_capsule(std::move(shared));
    ctx->saved_data["inputs"] = static_cast<int64_t>(inputs.size());
    ctx->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return reversible_add(acc, value);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    ctx->get_saved_variables(); // throws torch's own error if it was freed
    TORCH_CHECK_NOT_IMPLEMENTED(
        !c10::GradMode::is_enabled(),
        "reversible: expected a backward pass without create_graph, but got "
        "create_graph=True: the node engine rebuilds streams outside the "
        "graph, so a double backward is not possible");
    const auto shared = c10::static_intrusive_pointer_cast<Shared>(
        ctx->saved_data["shared"].toCapsule());
    const Record& record = *shared->record;
    std::vector<bool> needs(ctx->saved_data["inputs"].toInt());
    for (size_t i = 0; i < needs.size(); ++i) {
      // `value` and `acc` stand before.
      needs[i] = ctx->needs_input_grad(i + 2);
    }
    Recomputed run;
    {
      const auto cursor = shared->state->seek(record.position + 1);
      run = recompute(record, *cursor, needs);
      // Before the VJP, so that the old accumulator's memory is free in it.
      at::Tensor& acc = cursor->streams[record.acc];
      acc = reversible_sub(acc, run.value.detach());
      cursor->position = record.position;
      shared->state->done(*cursor);
    }
    tensor_list found = vjp(run, record, grads[0], needs);
    // State, record and value have no gradient; the accumulator's is passed on.
    tensor_list all(3);
    all.push_back(grads[0]);
    std::move(found.begin(), found.end(), std::back_inserter(all));
    return all;
  }
};

} // namespace

at::Tensor half_residual_node(
    const std::shared_ptr<CallState>& state,
    Record* record,
    const at::Tensor& acc,
    const at::Tensor& value,
    at::TensorList inputs) {
  return HalfResidualNode::apply(state, record, value, acc, inputs);
}

} // namespace torch_sm3::reversible
