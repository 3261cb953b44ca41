// SPDX-License-Identifier: Apache-2.0
#include <sm3_extras.h>

#include <ATen/ops/cat.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>

namespace torch_sm3::optim {
namespace {

// The accumulators that one collective takes.
struct Message {
  c10d::ProcessGroup* group;
  std::vector<at::Tensor> tensors;
};

std::vector<Message> messages_of(const std::vector<Slot>& slots) {
  std::vector<Message> messages;
  for (const Slot& slot : slots) {
    if (slot.hint == nullptr || !slot.hint->group) {
      continue;
    }
    auto* group = static_cast<c10d::ProcessGroup*>(slot.hint->group.get());
    for (const at::Tensor& numbers : slot.state->accumulators()) {
      auto message =
          std::find_if(messages.begin(), messages.end(), [&](const Message& m) {
            return m.group == group &&
                   m.tensors[0].scalar_type() == numbers.scalar_type() &&
                   m.tensors[0].device() == numbers.device();
          });
      if (message == messages.end()) {
        message = messages.insert(message, {group, {}});
      }
      message->tensors.push_back(numbers);
    }
  }
  return messages;
}

} // namespace

void reduce_pieces(const std::vector<Slot>& slots) {
  for (const Message& message : messages_of(slots)) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& numbers : message.tensors) {
      flat.push_back(numbers.reshape(-1));
    }
    std::vector<at::Tensor> all{at::cat(flat)};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    message.group->allreduce(all, options)->wait();
    int64_t start = 0;
    for (const at::Tensor& numbers : message.tensors) {
      numbers.copy_(
          all[0].narrow(0, start, numbers.numel()).reshape(numbers.sizes()));
      start += numbers.numel();
    }
  }
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
