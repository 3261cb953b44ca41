// SPDX-License-Identifier: Apache-2.0
#include <world.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <mutex>

namespace torch_sm3::reversible {
namespace {

constexpr c10::DeviceType kAutocastTypes[] = {at::kCPU, at::kCUDA};

at::Generator generator_of(c10::Device device) {
  return device.is_cpu() ? at::detail::getDefaultCPUGenerator()
                         : at::globalContext().defaultGenerator(device);
}

} // namespace

at::Tensor state_of(c10::Device device) {
  at::Generator generator = generator_of(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_state(c10::Device device, const at::Tensor& state) {
  at::Generator generator = generator_of(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

at::Tensor* GeneratorStates::find(c10::Device device) {
  for (auto& [key, state] : states_) {
    if (key == device) {
      return &state;
    }
  }
  return nullptr;
}

void GeneratorStates::set(c10::Device device, at::Tensor state) {
  if (at::Tensor* found = find(device)) {
    *found = std::move(state);
  } else {
    states_.emplace_back(device, std::move(state));
  }
}

std::vector<Autocast> autocast_now() {
  std::vector<Autocast> all;
  for (const c10::DeviceType type : kAutocastTypes) {
    all.push_back({type, std::nullopt});
    if (at::autocast::is_autocast_enabled(type)) {
      all.back().dtype = at::autocast::get_autocast_dtype(type);
    }
  }
  return all;
}

bool any_enabled(const std::vector<Autocast>& all) {
  return std::any_of(all.begin(), all.end(), [](const Autocast& autocast) {
    return autocast.dtype.has_value();
  });
}

AutocastGuard::AutocastGuard(const std::vector<Autocast>& wanted)
    : cache_(at::autocast::is_autocast_cache_enabled()) {
  at::autocast::set_autocast_cache_enabled(false);
  for (const Autocast& autocast : wanted) {
    outer_.push_back(
        {autocast.type,
         at::autocast::is_autocast_enabled(autocast.type),
         at::autocast::get_autocast_dtype(autocast.type)});
    at::autocast::set_autocast_enabled(
        autocast.type, autocast.dtype.has_value());
    if (autocast.dtype) {
      at::autocast::set_autocast_dtype(autocast.type, *autocast.dtype);
    }
  }
}

AutocastGuard::~AutocastGuard() {
  for (const Outer& outer : outer_) {
    at::autocast::set_autocast_enabled(outer.type, outer.enabled);
    at::autocast::set_autocast_dtype(outer.type, outer.dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_);
}

} // namespace torch_sm3::reversible
