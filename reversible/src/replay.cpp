// SPDX-License-Identifier: Apache-2.0
#include <replay.h>

#include <ATen/ops/equal.h>

#include <algorithm>

namespace torch_sm3::reversible {
namespace {

using Values = std::vector<at::Tensor>;

// Every restoration happens in a destructor, so also when F throws.
template <class Restore>
class Finally {
 public:
  explicit Finally(Restore restore) : restore_(std::move(restore)) {}
  // What was read a moment ago can be written back; if not, nothing can be
  // saved any more.
  // NOLINTNEXTLINE(bugprone-exception-escape)
  ~Finally() {
    restore_();
  }
  Finally(const Finally&) = delete;
  Finally& operator=(const Finally&) = delete;

 private:
  Restore restore_;
};

std::vector<int64_t> versions_of(at::TensorList tensors) {
  std::vector<int64_t> versions;
  versions.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    versions.push_back(tensor.is_inference() ? 0 : tensor._version());
  }
  return versions;
}

std::vector<c10::Device>
devices_of(at::TensorList arguments, const Inventory& inventory) {
  std::vector<c10::Device> devices{c10::Device(at::kCPU)};
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.is_cuda() &&
        std::find(devices.begin(), devices.end(), tensor.device()) ==
            devices.end()) {
      devices.push_back(tensor.device());
    }
  };
  std::for_each(arguments.begin(), arguments.end(), add);
  std::for_each(inventory.owned.begin(), inventory.owned.end(), add);
  for (const at::Tensor& buffer : inventory.buffers()) {
    add(buffer);
  }
  return devices;
}

} // namespace

Replay::Replay(const Function& function, const std::string& name)
    : function_(function),
      name_(name),
      inventory_(function.inventory()),
      flags_(inventory_->training()),
      versions_(versions_of(inventory_->owned)),
      autocast_(autocast_now()) {}

Values Replay::first(
    const std::function<Values()>& run,
    at::TensorList arguments,
    GeneratorStates& states) {
  const auto argument_versions = versions_of(arguments);
  const auto before = inventory_->buffers();
  const auto known = function_.learned().changed_buffers(flags_, before.size());
  std::vector<at::Tensor> copies(before.size());
  for (size_t i = 0; i < before.size(); ++i) {
    if (!known || (*known)[i]) {
      copies[i] = before[i].clone();
    }
  }
  const auto buffer_versions = versions_of(before);
  const auto devices = devices_of(arguments, *inventory_);
  for (const c10::Device device : devices) {
    if (states.find(device) == nullptr) {
      states.set(device, state_of(device));
    }
  }
  Values result;
  const WithoutSavedTensorHooks without_hooks;
  if (any_enabled(autocast_)) {
    const AutocastGuard guard(autocast_);
    result = run();
  } else {
    result = run();
  }
  for (const c10::Device device : devices) {
    const at::Tensor state = state_of(device);
    const at::Tensor old = *states.find(device);
    if (!at::equal(state, old)) {
      states_.emplace_back(device, old);
      states.set(device, state);
    }
  }
  TORCH_CHECK(
      argument_versions == versions_of(arguments),
      "reversible: expected F of ",
      name_,
      " to leave its inputs alone, but got a write in place to one of them "
      "(argument 'f')");
  record_buffers(before, copies, buffer_versions, known);
  return result;
}

void Replay::record_buffers(
    const std::vector<at::Tensor>& before,
    const std::vector<at::Tensor>& copies,
    const std::vector<int64_t>& versions,
    const std::optional<std::vector<bool>>& known) {
  const auto after = inventory_->buffers();
  const auto now = versions_of(before);
  std::vector<bool> changed(before.size());
  for (size_t i = 0; i < before.size(); ++i) {
    const bool same_object = after[i].is_same(before[i]);
    const bool same_version = now[i] == versions[i];
    if (copies[i].defined()) {
      // Batch norm writes its running statistics without a new version, so the
      // values are compared, once for each pattern of flags.
      changed[i] = known || !same_object || !same_version ||
                   !at::equal(copies[i], before[i]);
      if (changed[i]) {
        buffers_.emplace_back(i, copies[i]);
      }
      continue;
    }
    TORCH_CHECK(
        same_version,
        "reversible: expected F of ",
        name_,
        " to change buffer '",
        inventory_->buffer_name(i),
        "' in its first call already, but got a first change in a later one "
        "(argument 'f')");
    if (!same_object) {
      buffers_.emplace_back(i, before[i]);
    }
  }
  if (!known && !changed.empty()) {
    function_.learned().set_changed_buffers(flags_, std::move(changed));
  }
}

Values Replay::again(const std::function<Values()>& run) const {
  const auto now = function_.inventory();
  check_weights(*now);
  const auto flags = now->training();
  const bool other_flags = flags != flags_;
  const Finally restore_flags([&] {
    if (other_flags) {
      now->set_training(flags);
    }
  });
  if (other_flags) {
    now->set_training(flags_);
  }
  std::vector<std::pair<size_t, at::Tensor>> buffers;
  const Finally restore_buffers([&] {
    for (const auto& [index, value] : buffers) {
      now->set_buffer(index, value);
    }
  });
  for (const auto& [index, value] : buffers_) {
    buffers.emplace_back(index, now->keep_buffer(index));
    // A clone, because F changes it and the graph may be retained.
    now->set_buffer(index, value.clone());
  }
  std::vector<std::pair<c10::Device, at::Tensor>> states;
  const Finally restore_states([&] {
    for (const auto& [device, state] : states) {
      set_state(device, state);
    }
  });
  for (const auto& [device, state] : states_) {
    states.emplace_back(device, state_of(device));
    set_state(device, state);
  }
  const WithoutSavedTensorHooks without_hooks;
  if (any_enabled(autocast_) || any_enabled(autocast_now())) {
    const AutocastGuard guard(autocast_);
    return run();
  }
  return run();
}

void Replay::check_weights(const Inventory& now) const {
  bool same = now.owned.size() == inventory_->owned.size() &&
              now.training().size() == flags_.size();
  for (size_t i = 0; same && i < now.owned.size(); ++i) {
    same = now.owned[i].is_same(inventory_->owned[i]);
  }
  TORCH_CHECK(
      same,
      "reversible: expected F to keep its weights until the backward pass, but "
      "got others in ",
      name_);
  TORCH_CHECK(
      versions_of(now.owned) == versions_,
      "reversible: expected the weights of F unchanged until the backward "
      "pass, but got a newer version of one in ",
      name_);
}

} // namespace torch_sm3::reversible
