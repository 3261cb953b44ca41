// SPDX-License-Identifier: Apache-2.0
// Parameters that are pieces of a flattened tensor, the others on other ranks.
#include <sm3_extras.h>
#include <torch_sm3/sm3_ops.h>

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <limits>

namespace torch_sm3::optim {
namespace {

// What one collective takes.
struct Message {
  c10d::ProcessGroup* group;
  std::vector<at::Tensor> tensors;
};

bool shared(const Slot& slot) {
  return slot.hint != nullptr && slot.hint->group &&
         !slot.state->accumulators().empty();
}

void collect(
    std::vector<Message>& messages,
    const Slot& slot,
    const std::vector<at::Tensor>& tensors) {
  auto* group = static_cast<c10d::ProcessGroup*>(slot.hint->group.get());
  for (const at::Tensor& tensor : tensors) {
    auto message =
        std::find_if(messages.begin(), messages.end(), [&](const Message& m) {
          return m.group == group &&
                 m.tensors[0].scalar_type() == tensor.scalar_type() &&
                 m.tensors[0].device() == tensor.device();
        });
    if (message == messages.end()) {
      message = messages.insert(message, {group, {}});
    }
    message->tensors.push_back(tensor);
  }
}

void maximum_over_ranks(const std::vector<Message>& messages) {
  for (const Message& message : messages) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& tensor : message.tensors) {
      flat.push_back(tensor.reshape(-1));
    }
    std::vector<at::Tensor> all{at::cat(flat)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    message.group->allreduce(all, options)->wait();
    int64_t start = 0;
    for (const at::Tensor& tensor : message.tensors) {
      tensor.copy_(
          all[0].narrow(0, start, tensor.numel()).reshape(tensor.sizes()));
      start += tensor.numel();
    }
  }
}

// The largest squared gradient of each set: what variant I makes of zero
// accumulators, on a parameter that nobody sees. At the end whether there is a
// gradient: a rank may lack it.
std::vector<at::Tensor> maxima_of(
    const Slot& slot,
    const at::Tensor& grad,
    const std::optional<at::Tensor>& grad_scale) {
  std::vector<at::Tensor> maxima;
  for (const at::Tensor& numbers : slot.state->accumulators()) {
    maxima.push_back(at::zeros_like(numbers));
  }
  if (grad.defined()) {
    SM3UpdateOptions options;
    options.variant = "I";
    options.grad_scale = grad_scale;
    cover_of(slot).encode(options.covers);
    options.global_index = {slot.ordinal, slot.hint->offset, 1};
    sm3_update_(
        {at::zeros_like(slot.param)},
        {grad},
        maxima,
        {},
        {},
        {},
        {at::zeros({}, at::kLong)},
        0.0,
        options);
  }
  maxima.push_back(
      at::full_like(
          slot.state->accumulators()[0].reshape(-1).narrow(0, 0, 1),
          grad.defined() ? 1.0 : 0.0));
  return maxima;
}

// As the kernels round it.
at::Tensor fold(
    const at::Tensor& numbers,
    const at::Tensor& maxima,
    const SM3Options& options) {
  const double beta2 = options.beta2().value_or(1.0);
  const double largest = numbers.scalar_type() == at::kDouble
                             ? std::numeric_limits<double>::max()
                             : std::numeric_limits<float>::max();
  if (beta2 == 1.0) {
    return at::add(numbers, maxima).clamp_max(largest);
  }
  const at::Tensor mean =
      at::add(numbers.mul(beta2), maxima.mul(1 - beta2)).clamp_max(largest);
  return options.compat() == "enealor" ? at::maximum(numbers, mean) : mean;
}

void fold_all(
    const Slot& slot,
    const std::vector<at::Tensor>& maxima,
    const std::optional<at::Tensor>& found_inf) {
  at::Tensor changes = maxima.back().ne(0);
  if (found_inf.has_value()) {
    const at::Tensor skip = found_inf->to(changes.device()).ne(0);
    changes = changes.logical_and(skip.logical_not().reshape(1));
  }
  for (size_t k = 0; k + 1 < maxima.size(); ++k) {
    const at::Tensor& numbers = slot.state->accumulators()[k];
    const at::Tensor folded = fold(numbers, maxima[k], *slot.options);
    numbers.copy_(at::where(changes, folded, numbers));
  }
}

} // namespace

void agree(const std::vector<Slot>& slots, at::Tensor& found) {
  std::vector<Message> messages;
  for (const Slot& slot : slots) {
    if (shared(slot)) {
      auto* group = static_cast<c10d::ProcessGroup*>(slot.hint->group.get());
      const bool known =
          std::any_of(messages.begin(), messages.end(), [&](const Message& m) {
            return m.group == group;
          });
      if (!known) {
        found = found.to(slot.param.device()).ne(0).to(at::kFloat).reshape(1);
        messages.push_back({group, {found}});
        maximum_over_ranks({messages.back()});
      }
    }
  }
}

bool reduces_first(const Slot& slot) {
  return shared(slot) && slot.options->variant() == "I";
}

void reduce_gradients(
    const std::vector<Slot>& slots,
    const std::vector<at::Tensor>& grads,
    const Signals& signals) {
  std::vector<Message> messages;
  std::vector<std::vector<at::Tensor>> maxima(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    if (reduces_first(slots[i])) {
      maxima[i] = maxima_of(slots[i], grads[i], signals.grad_scale);
      collect(messages, slots[i], maxima[i]);
    }
  }
  maximum_over_ranks(messages);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (!maxima[i].empty()) {
      fold_all(slots[i], maxima[i], signals.found_inf);
    }
  }
}

void reduce_pieces(const std::vector<Slot>& slots) {
  std::vector<Message> messages;
  for (const Slot& slot : slots) {
    if (shared(slot) && !reduces_first(slot)) {
      collect(messages, slot, slot.state->accumulators());
    }
  }
  maximum_over_ranks(messages);
}

void SM3::set_shape_hint(
    const at::Tensor& param,
    at::IntArrayRef shape,
    int64_t offset,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  set_shape_hint(param, shape, offset);
  extras_->hints[param.unsafeGetTensorImpl()].group = group;
}

} // namespace torch_sm3::optim
