// SPDX-License-Identifier: Apache-2.0
#include <memory_frame.h>
#include <torch_sm3/check.h>
#include <torch_sm3/reversible/remember.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>

namespace torch_sm3::reversible {

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

void ReversibleMemory::enter(MemoryMode mode) {
  MemoryFrame frame{
      c10::intrusive_ptr<ReversibleMemory>::unsafe_reclaim_from_nonowning(this),
      mode};
  if (mode == MemoryMode::kRecall || mode == MemoryMode::kVjp) {
    frame.load();
  }
  memory_frames().push_back(std::move(frame));
}

void ReversibleMemory::leave() {
  TORCH_CHECK(
      !memory_frames().empty() && memory_frames().back().memory.get() == this,
      "ReversibleMemory.leave: expected the memory that this thread entered "
      "last, but got that of ",
      name);
  memory_frames().pop_back();
}

void ReversibleMemory::finish() const {
  TORCH_CHECK(
      !memory_frames().empty() && memory_frames().back().memory.get() == this,
      "ReversibleMemory.finish: expected the memory that this thread entered "
      "last, but got that of ",
      name);
  const MemoryFrame& frame = memory_frames().back();
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
  if (depth == 0 || memory_frames()[depth - 1].mode == MemoryMode::kOff) {
    return x;
  }
  if (memory_frames()[depth - 1].mode == MemoryMode::kRecord) {
    return memory_frames()[depth - 1].record(
        remember_in(depth - 1, x, key), key);
  }
  return memory_frames()[depth - 1].recall(x, key);
}

at::Tensor reversible_remember(const at::Tensor& x, std::string_view key) {
  return remember_in(memory_frames().size(), x, std::string(key));
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
