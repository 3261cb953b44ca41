// SPDX-License-Identifier: Apache-2.0
#include <sm3_face.h>
#include <torch_sm3/check.h>
#include <torch_sm3/sm3_ops.h>

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

namespace torch_sm3::optim {
namespace {

// What one call of an operator works on: slots of one group on one device.
struct Batch {
  const SM3Options* options;
  at::Device device;
  std::vector<const Slot*> slots;
  std::vector<at::Tensor> grads;
};

// As the operators do, but for all groups before the first of them.
void check_grad(const Slot& slot, const at::Tensor& grad) {
  TORCH_SM3_CHECK_VALUE(
      grad.layout() == at::kStrided || grad.layout() == at::kSparse,
      "SM3",
      "grads",
      "dense or COO gradients",
      grad.layout());
  TORCH_SM3_CHECK_VALUE(
      grad.sizes() == slot.param.sizes(),
      "SM3",
      "grads",
      c10::str("shape ", slot.param.sizes(), " for parameter ", slot.ordinal),
      grad.sizes());
  TORCH_SM3_CHECK_VALUE(
      grad.device() == slot.param.device(),
      "SM3",
      "grads",
      c10::str("device ", slot.param.device(), " for parameter ", slot.ordinal),
      grad.device());
  TORCH_SM3_CHECK_VALUE(
      at::isFloatingType(grad.scalar_type()) &&
          (grad.scalar_type() != at::kDouble ||
           slot.param.scalar_type() == at::kDouble),
      "SM3",
      "grads",
      c10::str("a dtype for a ", slot.param.scalar_type(), " parameter"),
      grad.scalar_type());
  TORCH_CHECK(
      grad.layout() == at::kStrided || slot.options->weight_decay() == 0,
      "SM3: expected weight_decay 0 with a sparse gradient, but got ",
      slot.options->weight_decay(),
      " (argument 'weight_decay')");
}

void encode_covers(
    const std::vector<const Slot*>& slots,
    SM3UpdateOptions& to) {
  const auto automatic = [](const Slot* slot) {
    return slot->hint == nullptr && slot->options->cover() == Cover();
  };
  if (std::all_of(slots.begin(), slots.end(), automatic)) {
    return; // the operator does it for all shapes
  }
  for (const Slot* slot : slots) {
    if (automatic(slot)) {
      to.covers.push_back(-1);
    } else {
      cover_of(*slot).encode(to.covers);
    }
  }
}

void encode_places(
    const std::vector<const Slot*>& slots,
    SM3UpdateOptions& to) {
  const bool needed =
      std::any_of(slots.begin(), slots.end(), [](const Slot* slot) {
        return slot->hint != nullptr || slot->options->stochastic_rounding();
      });
  if (!needed) {
    return;
  }
  for (const Slot* slot : slots) {
    to.global_index.push_back(slot->ordinal);
    to.global_index.push_back(slot->hint == nullptr ? 0 : slot->hint->offset);
    const size_t first = to.global_index.size();
    int64_t stride = 1;
    for (int64_t d = slot->param.dim() - 1; d >= 0; --d) {
      to.global_index.insert(to.global_index.begin() + first, stride);
      stride *= slot->param.size(d);
    }
  }
}

std::optional<at::Tensor>
on_device(const std::optional<at::Tensor>& tensor, at::Device device) {
  if (!tensor.has_value()) {
    return std::nullopt;
  }
  return tensor->to(device, /*non_blocking=*/true);
}

bool rows_only(const SM3Options& options) {
  return options.compat() == "google" || options.compat() == "enealor";
}

void warn_stale(SM3ParamState& state, const SM3Options& options) {
  if (state.stale()) {
    TORCH_WARN_ONCE(
        "SM3: a dense gradient reads accumulators that sparse gradients left "
        "behind under compat \"",
        options.compat(),
        "\", which moves the rows' alone.");
    state.stale(false);
  }
}

SM3UpdateOptions update_options(
    const std::vector<const Slot*>& slots,
    at::Device device,
    const Signals& signals) {
  const SM3Options& o = *slots[0]->options;
  SM3UpdateOptions to;
  to.momentum = o.momentum();
  to.beta2 = o.beta2().value_or(1.0);
  to.eps = o.eps();
  to.weight_decay = o.weight_decay();
  to.maximize = o.maximize();
  to.variant = reduces_first(*slots[0]) ? "given" : o.variant();
  to.compat = o.compat();
  to.stochastic_rounding = o.stochastic_rounding();
  to.seed = o.seed();
  to.grad_scale = on_device(signals.grad_scale, device);
  to.found_inf = on_device(signals.found_inf, device);
  encode_covers(slots, to);
  encode_places(slots, to);
  return to;
}

void step_dense(const Batch& batch, const Signals& signals) {
  std::vector<at::Tensor> params, accumulators, buffers, scales, lost, steps;
  const SM3Options& o = *batch.options;
  bool scaled = false;
  const at::Tensor none = at::empty({0}, batch.slots[0]->param.options());
  for (const Slot* slot : batch.slots) {
    SM3ParamState& state = *slot->state;
    warn_stale(state, o);
    params.push_back(slot->param);
    steps.push_back(state.step());
    for (const at::Tensor& numbers : state.accumulators()) {
      accumulators.push_back(numbers);
    }
    if (o.momentum() > 0) {
      buffers.push_back(state.momentum_buffer());
      const bool has = state.momentum_scale().defined();
      scaled = scaled || has;
      scales.push_back(has ? state.momentum_scale() : none);
    }
    if (o.kahan()) {
      const bool has = state.compensation().defined();
      lost.push_back(has ? state.compensation() : none);
    }
  }
  if (!scaled) {
    scales.clear();
  }
  sm3_update_(
      params,
      batch.grads,
      accumulators,
      buffers,
      scales,
      lost,
      steps,
      o.lr(),
      update_options(batch.slots, batch.device, signals));
}

void step_sparse(
    const Slot& slot,
    const at::Tensor& grad,
    const Signals& signals) {
  std::vector<at::Tensor> lost;
  if (slot.state->compensation().defined()) {
    lost.push_back(slot.state->compensation());
  }
  sm3_sparse_update_(
      slot.param,
      grad._indices(),
      grad._values(),
      slot.state->accumulators(),
      lost,
      slot.state->step(),
      slot.options->lr(),
      update_options({&slot}, slot.param.device(), signals));
  slot.state->stale(
      rows_only(*slot.options) && slot.state->accumulators().size() > 1);
}

// Adds to found_inf what the gradients say, one flag per device.
at::Tensor found_in(
    const std::vector<at::Tensor>& grads,
    const std::optional<at::Tensor>& found_inf) {
  std::map<std::string, std::vector<at::Tensor>> by_device;
  for (const at::Tensor& grad : grads) {
    if (grad.defined()) {
      by_device[grad.device().str()].push_back(
          grad.is_sparse() ? grad._values() : grad);
    }
  }
  at::Tensor sum;
  if (found_inf.has_value()) {
    sum = found_inf->ne(0).to(at::kFloat).reshape({});
  }
  for (const auto& [name, tensors] : by_device) {
    const at::Tensor found =
        at::zeros({}, tensors[0].options().dtype(at::kFloat));
    sm3_nonfinite_(tensors, found);
    sum = sum.defined()
              ? at::add(sum.to(found.device(), /*non_blocking=*/true), found)
              : found;
  }
  return sum.defined() ? sum : at::zeros({});
}

std::vector<Batch> dense_batches(
    const std::vector<Slot>& slots,
    const std::vector<at::Tensor>& grads) {
  std::vector<Batch> batches;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (!grads[i].defined() || grads[i].is_sparse()) {
      continue;
    }
    const at::Device device = slots[i].param.device();
    auto batch =
        std::find_if(batches.begin(), batches.end(), [&](const Batch& b) {
          return b.options == slots[i].options && b.device == device &&
                 reduces_first(*b.slots[0]) == reduces_first(slots[i]);
        });
    if (batch == batches.end()) {
      batch = batches.insert(batch, {slots[i].options, device, {}, {}});
    }
    batch->slots.push_back(&slots[i]);
    batch->grads.push_back(grads[i]);
  }
  return batches;
}

} // namespace

void step_slots(
    const std::vector<Slot>& slots,
    const std::vector<at::Tensor>& given,
    const Signals& given_signals,
    at::Tensor& skipped) {
  for (size_t i = 0; i < slots.size(); ++i) {
    if (given[i].defined()) {
      check_grad(slots[i], given[i]);
    }
  }
  std::vector<at::Tensor> grads(given.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    if (given[i].defined()) {
      // Duplicates are added, then squared.
      grads[i] = given[i].is_sparse() ? given[i].coalesce() : given[i];
    }
    if (slots[i].wants_state() || grads[i].defined()) {
      settle_state(slots[i], grads[i]);
    }
  }
  Signals signals = given_signals;
  if (signals.skip_nonfinite) {
    signals.found_inf = found_in(grads, signals.found_inf);
  }
  if (signals.found_inf.has_value()) {
    at::Tensor& found = *signals.found_inf;
    agree(slots, found);
    skipped = at::add(
        skipped.to(found.device()), found.ne(0).to(at::kLong).reshape({}));
  }
  reduce_gradients(slots, grads, signals);
  for (const Batch& batch : dense_batches(slots, grads)) {
    step_dense(batch, signals);
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    if (grads[i].defined() && grads[i].is_sparse()) {
      step_sparse(slots[i], grads[i], signals);
    }
  }
  reduce_pieces(slots);
}

} // namespace torch_sm3::optim
