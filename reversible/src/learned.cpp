// SPDX-License-Identifier: Apache-2.0
#include <learned.h>

#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/api/function_impl.h>

#include <unordered_map>

namespace torch_sm3::reversible {
namespace {

struct Entry {
  // Tells a module from a later one at the same address.
  c10::weak_intrusive_ptr<c10::ivalue::Object> module;
  std::shared_ptr<ScriptedModule> known;
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<const void*, Entry> entries;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

} // namespace

std::optional<std::vector<bool>>
Learned::changed_buffers(const std::vector<bool>& flags, size_t buffers) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = changed_.find(flags);
  if (found == changed_.end() || found->second.size() != buffers) {
    return std::nullopt;
  }
  return found->second;
}

void Learned::set_changed_buffers(
    const std::vector<bool>& flags,
    std::vector<bool> changed) {
  const std::lock_guard<std::mutex> lock(mutex_);
  changed_[flags] = std::move(changed);
}

torch::jit::Code ScriptedModule::forward(const torch::jit::Function& method) {
  const size_t key = (at::autocast::is_autocast_enabled(at::kCPU) ? 1 : 0) +
                     (at::autocast::is_autocast_enabled(at::kCUDA) ? 2 : 0);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& code = codes_[key];
  if (!code) {
    code.emplace(
        torch::jit::toGraphFunction(method).optimized_graph(), "forward");
  }
  return *code;
}

std::shared_ptr<ScriptedModule> known_of(const ObjectPtr& module) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.entries.find(module.get());
  if (found != all.entries.end() && !found->second.module.expired()) {
    return found->second.known;
  }
  std::erase_if(all.entries, [](const auto& item) {
    return item.second.module.expired();
  });
  const auto known = std::make_shared<ScriptedModule>();
  all.entries.emplace(
      module.get(),
      Entry{c10::weak_intrusive_ptr<c10::ivalue::Object>(module), known});
  return known;
}

} // namespace torch_sm3::reversible
