// SPDX-License-Identifier: Apache-2.0
#include <bit_pack.h>
#include <memory_guard.h>
#include <torch_sm3/check.h>
#include <torch_sm3/reversible/remember.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

namespace torch_sm3::reversible {

// A memory that a thread has entered, and how far its recall has come.
struct MemoryFrame {
  using Entry = ReversibleMemory::Entry;

  c10::intrusive_ptr<ReversibleMemory> memory;
  MemoryMode mode;
  std::vector<Entry> entries = {}; // copies, so that no lock is needed later
  std::vector<at::Tensor> values = {};
  std::vector<bool> taken = {};

  void load();
  void load(std::vector<at::Tensor> kept);
  at::Tensor record(const at::Tensor& x, const std::string& key) const;
  at::Tensor recall(const at::Tensor& x, const std::string& key);

 private:
  size_t find(const std::string& key) const;
  void check(const Entry& entry, const at::Tensor& x, size_t index) const;
};

namespace {

thread_local std::vector<MemoryFrame> frames;

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

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor._version();
}

// "value 2" or "value 'route'", for messages.
std::string named(const std::string& key, size_t index) {
  return key.empty() ? c10::str("value ", index) : c10::str("'", key, "'");
}

} // namespace

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
  const at::Tensor value =
      is_packed(x.scalar_type()) ? pack_bits(x) : x.detach();
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
  const at::Tensor value =
      is_packed(entry.type)
          ? unpack_bits(values[index], entry.sizes, entry.strides)
          : values[index].detach();
  if (c10::GradMode::is_enabled() && x.requires_grad()) {
    return Recall::apply(x, value);
  }
  return value;
}

MemoryMode memory_mode(std::string_view name) {
  if (name == "record") {
    return MemoryMode::kRecord;
  }
  if (name == "recall") {
    return MemoryMode::kRecall;
  }
  if (name == "vjp") {
    return MemoryMode::kVjp;
  }
  TORCH_SM3_CHECK_VALUE(
      name == "off",
      "ReversibleMemory.enter",
      "mode",
      "'record', 'recall', 'vjp' or 'off'",
      c10::str("'", name, "'"));
  return MemoryMode::kOff;
}

MemoryGuard::MemoryGuard(
    const c10::intrusive_ptr<ReversibleMemory>& memory,
    MemoryMode mode,
    std::vector<at::Tensor> values)
    : depth_(frames.size()) {
  MemoryFrame frame{memory, mode};
  if (mode == MemoryMode::kRecall || mode == MemoryMode::kVjp) {
    frame.load(std::move(values));
  }
  frames.push_back(std::move(frame));
}

MemoryGuard::~MemoryGuard() {
  // Also those that F entered and, because it threw, never left.
  frames.resize(depth_, MemoryFrame{nullptr, MemoryMode::kOff});
}

void ReversibleMemory::enter(MemoryMode mode) {
  MemoryFrame frame{
      c10::intrusive_ptr<ReversibleMemory>::unsafe_reclaim_from_nonowning(this),
      mode};
  if (mode == MemoryMode::kRecall || mode == MemoryMode::kVjp) {
    frame.load();
  }
  frames.push_back(std::move(frame));
}

void ReversibleMemory::leave() {
  TORCH_CHECK(
      !frames.empty() && frames.back().memory.get() == this,
      "ReversibleMemory.leave: expected the memory that this thread entered "
      "last, but got that of ",
      name);
  frames.pop_back();
}

void ReversibleMemory::finish() const {
  TORCH_CHECK(
      !frames.empty() && frames.back().memory.get() == this,
      "ReversibleMemory.finish: expected the memory that this thread entered "
      "last, but got that of ",
      name);
  const MemoryFrame& frame = frames.back();
  const auto recalled =
      std::count(frame.taken.begin(), frame.taken.end(), true);
  TORCH_CHECK(
      frame.mode != MemoryMode::kRecall ||
          recalled == static_cast<int64_t>(frame.taken.size()),
      "remember: expected as many values as the first run of ",
      name,
      " remembered, ",
      frame.taken.size(),
      ", but got ",
      recalled);
}

std::vector<at::Tensor> ReversibleMemory::tensors() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < values_.size(); ++i) {
    TORCH_CHECK(
        version_of(values_[i]) == entries_[i].version,
        "remember: expected ",
        named(entries_[i].key, i),
        " of ",
        name,
        " to stay as it was remembered, but got a write in place to it");
  }
  return values_;
}

void ReversibleMemory::clear_tensors() {
  const std::lock_guard<std::mutex> lock(mutex_);
  values_.clear();
}

void ReversibleMemory::load(at::TensorList tensors) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_SM3_CHECK_VALUE(
      tensors.size() == entries_.size(),
      "ReversibleMemory.load",
      "tensors",
      c10::str("the ", entries_.size(), " values of ", name),
      tensors.size());
  values_ = tensors.vec();
  for (size_t i = 0; i < values_.size(); ++i) {
    entries_[i].version = version_of(values_[i]);
  }
}

size_t ReversibleMemory::size() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return entries_.size();
}

at::Tensor remember(const at::Tensor& x, const std::string& key) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("torch_sm3::reversible_remember", "")
          .typed<at::Tensor(const at::Tensor&, std::string_view)>();
  return op.call(x, key);
}

namespace {

// What the frames below `depth` make of `x`. A function inside another one is
// recorded by both, and when the outer one runs again, the inner one, whose
// sequence is called anew, records what the outer one recalls.
at::Tensor
remember_in(size_t depth, const at::Tensor& x, const std::string& key) {
  if (depth == 0 || frames[depth - 1].mode == MemoryMode::kOff) {
    return x;
  }
  if (frames[depth - 1].mode == MemoryMode::kRecord) {
    return frames[depth - 1].record(remember_in(depth - 1, x, key), key);
  }
  return frames[depth - 1].recall(x, key);
}

at::Tensor reversible_remember(const at::Tensor& x, std::string_view key) {
  return remember_in(frames.size(), x, std::string(key));
}

} // namespace

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  using Self = c10::intrusive_ptr<ReversibleMemory>;
  m.class_<ReversibleMemory>("ReversibleMemory")
      .def(torch::init<>())
      .def_readwrite("name", &ReversibleMemory::name)
      .def(
          "enter",
          [](const Self& self, const std::string& mode) {
            self->enter(memory_mode(mode));
          })
      .def("leave", &ReversibleMemory::leave)
      .def("finish", &ReversibleMemory::finish)
      .def("tensors", &ReversibleMemory::tensors)
      .def("clear_tensors", &ReversibleMemory::clear_tensors)
      .def(
          "load",
          [](const Self& self, const std::vector<at::Tensor>& tensors) {
            self->load(tensors);
          })
      .def("__len__", [](const Self& self) {
        return static_cast<int64_t>(self->size());
      });
  // CONSERVATIVE: what it returns depends on the run, and the order counts.
  m.def(
      torch::schema(
          "reversible_remember(Tensor x, str key=\"\") -> Tensor",
          c10::AliasAnalysisKind::CONSERVATIVE));
}

TORCH_LIBRARY_IMPL(torch_sm3, CompositeImplicitAutograd, m) {
  m.impl("reversible_remember", &reversible_remember);
}

} // namespace torch_sm3::reversible
