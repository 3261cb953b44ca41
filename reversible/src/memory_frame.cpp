// SPDX-License-Identifier: Apache-2.0
#include <bit_pack.h>
#include <memory_frame.h>
#include <memory_guard.h>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

namespace torch_sm3::reversible {
namespace {

// The recalled value with the gradient of what would have been chosen now.
struct Recall : torch::autograd::Function<Recall> {
  static at::Tensor forward(
      torch::autograd::AutogradContext* ctx,
      const at::Tensor& /*x*/,
      const at::Tensor& value) {
    ctx->set_materialize_grads(false);
    return value.detach();
  }

  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext* /*ctx*/,
      const torch::autograd::tensor_list& grads) {
    return {grads[0], at::Tensor()};
  }
};

bool is_packed(at::ScalarType type) {
  return type == at::kBool;
}

} // namespace

std::vector<MemoryFrame>& memory_frames() {
  thread_local std::vector<MemoryFrame> frames;
  return frames;
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

std::string named(const std::string& key, size_t index) {
  return key.empty() ? c10::str("value ", index) : c10::str("'", key, "'");
}

void MemoryFrame::load() {
  std::vector<at::Tensor> kept;
  {
    const std::lock_guard<std::mutex> lock(memory->mutex_);
    kept = memory->values_;
  }
  load(std::move(kept));
}

void MemoryFrame::load(std::vector<at::Tensor> kept) {
  const std::lock_guard<std::mutex> lock(memory->mutex_);
  TORCH_CHECK(
      kept.size() == memory->entries_.size(),
      "remember: expected the ",
      memory->entries_.size(),
      " values of ",
      memory->name,
      " to be loaded before they are recalled, but got ",
      kept.size());
  entries = memory->entries_;
  values = std::move(kept);
  taken.resize(entries.size());
}

at::Tensor
MemoryFrame::record(const at::Tensor& x, const std::string& key) const {
  at::Tensor value = is_packed(x.scalar_type()) ? pack_bits(x) : x.detach();
  const std::lock_guard<std::mutex> lock(memory->mutex_);
  memory->entries_.push_back(
      {key,
       x.scalar_type(),
       x.sizes().vec(),
       x.strides().vec(),
       version_of(value)});
  memory->values_.push_back(value);
  return x;
}

size_t MemoryFrame::find(const std::string& key) const {
  size_t found = entries.size();
  for (size_t i = entries.size(); i-- > 0;) {
    // A checkpointed region may run any number of times.
    if (entries[i].key == key && !(taken[i] && mode == MemoryMode::kRecall)) {
      TORCH_CHECK(
          mode == MemoryMode::kRecall || found == entries.size(),
          "remember: expected a key of its own for each value inside a "
          "checkpointed region of ",
          memory->name,
          ", but got '",
          key,
          "' twice (argument 'key')");
      found = i;
    }
  }
  return found;
}

void MemoryFrame::check(const Entry& entry, const at::Tensor& x, size_t index)
    const {
  TORCH_CHECK(
      entry.type == x.scalar_type() && x.sizes().equals(entry.sizes) &&
          values[index].device() == x.device(),
      "remember: expected ",
      named(entry.key, index),
      " of ",
      memory->name,
      " as in its first run, ",
      entry.type,
      " of shape ",
      at::IntArrayRef(entry.sizes),
      " on ",
      values[index].device(),
      ", but got ",
      x.scalar_type(),
      " of shape ",
      x.sizes(),
      " on ",
      x.device());
}

at::Tensor MemoryFrame::recall(const at::Tensor& x, const std::string& key) {
  TORCH_CHECK(
      mode == MemoryMode::kRecall || !key.empty(),
      "remember: expected a key inside a checkpointed region of ",
      memory->name,
      ", whose second run may come in another order, but got none (argument "
      "'key')");
  const size_t index = find(key);
  TORCH_CHECK(
      index < entries.size(),
      "remember: expected as many values as the first run of ",
      memory->name,
      " remembered, ",
      entries.size(),
      ", but got ",
      key.empty() ? std::string("one more")
                  : c10::str("one more for the key '", key, "'"));
  taken[index] = true;
  const Entry& entry = entries[index];
  check(entry, x, index);
  at::Tensor value =
      is_packed(entry.type)
          ? unpack_bits(values[index], entry.sizes, entry.strides)
          : values[index].detach();
  if (c10::GradMode::is_enabled() && x.requires_grad()) {
    return Recall::apply(x, value);
  }
  return value;
}

MemoryGuard::MemoryGuard(
    const c10::intrusive_ptr<ReversibleMemory>& memory,
    MemoryMode mode,
    std::vector<at::Tensor> values)
    : depth_(memory_frames().size()) {
  MemoryFrame frame{memory, mode};
  if (mode == MemoryMode::kRecall || mode == MemoryMode::kVjp) {
    frame.load(std::move(values));
  }
  memory_frames().push_back(std::move(frame));
}

MemoryGuard::~MemoryGuard() {
  // Also those that F entered and, because it threw, never left.
  memory_frames().resize(depth_, MemoryFrame{nullptr, MemoryMode::kOff});
}

} // namespace torch_sm3::reversible
