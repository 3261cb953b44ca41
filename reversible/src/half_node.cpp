// SPDX-License-Identifier: Apache-2.0
#include <call_state.h>
#include <memory_guard.h>
#include <vjp.h>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

namespace torch_sm3::reversible {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

struct Shared : torch::CustomClassHolder {
  std::shared_ptr<CallState> state;
  Record* record = nullptr;
};

// Not a tensor to autograd: the result is an output only.
struct Result {
  at::Tensor out;
};

// Runs F with grad at the rebuilt inputs.
Recomputed recompute(
    const Record& record,
    const Cursor& cursor,
    std::vector<at::Tensor> remembered,
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
  context.reserve(record.half.reads.size());
  for (const size_t i : record.half.reads) {
    context.push_back(track(cursor.streams[i]));
  }
  std::vector<at::Tensor> side = cursor.side;
  for (const auto& place : record.side) {
    // A tensor that F is given twice is one input.
    if (place && side[*place].is_same(cursor.side[*place])) {
      side[*place] = track(cursor.side[*place]);
    }
  }
  result.values = record.again(
      context, side, std::move(remembered), cursor.streams[record.half.acc]);
  const auto& owned = record.replay->owned();
  result.inputs.insert(result.inputs.end(), owned.begin(), owned.end());
  return result;
}

void check_single_backward() {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !c10::GradMode::is_enabled(),
      "reversible: expected a backward pass without create_graph, but got "
      "create_graph=True: the node engine rebuilds streams outside the "
      "graph, so a double backward is not possible");
}

// The gradients of the accumulator and of the inputs.
tensor_list reverse(
    CallState& state,
    const Record& record,
    const at::Tensor& grad,
    const std::vector<bool>& needs) {
  Recomputed run;
  RuleGrads grads;
  std::vector<at::Tensor> remembered;
  {
    const auto cursor = state.seek(record.position + 1);
    remembered = cursor->unpack(record.remembered);
    run = recompute(record, *cursor, remembered, needs);
    // Before the VJP, so that the old accumulator's memory is free in it.
    const auto values = detached(run.values);
    at::Tensor& acc = cursor->streams[record.half.acc];
    acc = CallState::rebuilt(record, *cursor, values);
    cursor->position = record.position;
    grads = rule_backward(record.half.rule, grad, acc, values);
    state.done();
  }
  // Checkpointed regions of F run again in it.
  const MemoryGuard guard(
      record.memory, MemoryMode::kVjp, std::move(remembered));
  tensor_list found = vjp(record, run, grads.values, needs);
  found.insert(found.begin(), grads.acc);
  return found;
}

struct HalfNode : torch::autograd::Function<HalfNode> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const std::shared_ptr<CallState>& state,
      Record* record,
      const Result& result,
      const at::Tensor& /*acc*/,
      at::TensorList inputs) {
    auto shared = c10::make_intrusive<Shared>();
    shared->state = state;
    shared->record = record;
    ctx->saved_data["shared"] = c10::IValue::make_capsule(std::move(shared));
    ctx->saved_data["inputs"] = static_cast<int64_t>(inputs.size());
    ctx->set_materialize_grads(false);
    return result.out;
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    ctx->get_saved_variables(); // throws torch's own error if it was freed
    check_single_backward();
    const auto shared = c10::static_intrusive_pointer_cast<Shared>(
        ctx->saved_data["shared"].toCapsule());
    const Record& record = *shared->record;
    const at::Tensor& grad = grads[0];
    std::vector<bool> needs(ctx->saved_data["inputs"].toInt());
    for (size_t i = 0; i < needs.size(); ++i) {
      needs[i] = ctx->needs_input_grad(i + 1); // after `acc`
    }
    const bool passes = record.half.rule.kind == Rule::Kind::kAdd ||
                        record.half.rule.kind == Rule::Kind::kGrid;
    const bool idle =
        std::none_of(needs.begin(), needs.end(), [](bool x) { return x; });
    tensor_list all(3); // state, record and result have no gradient
    if (!grad.defined() || (passes && idle)) {
      shared->state->done();
      all.push_back(grad);
      all.resize(all.size() + needs.size());
      return all;
    }
    tensor_list found;
    try {
      found = reverse(*shared->state, record, grad, needs);
    } catch (...) {
      // The engine's final callbacks do not run after an error.
      shared->state->forget();
      throw;
    }
    std::move(found.begin(), found.end(), std::back_inserter(all));
    return all;
  }
};

} // namespace

at::Tensor half_node(
    const std::shared_ptr<CallState>& state,
    Record* record,
    const at::Tensor& out,
    const at::Tensor& acc,
    at::TensorList inputs) {
  return HalfNode::apply(state, record, Result{out}, acc, inputs);
}

} // namespace torch_sm3::reversible
