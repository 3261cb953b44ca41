// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What surrounds F: generators, autocast and the hooks of saved tensors.

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>
#include <utility>
#include <vector>

namespace torch_sm3::reversible {

/// Returns the state of a device's default generator.
at::Tensor state_of(c10::Device device);

void set_state(c10::Device device, const at::Tensor& state);

/// States of the generators after the last F of a call.
class GeneratorStates {
 public:
  /// Returns the kept state of a device, or null.
  at::Tensor* find(c10::Device device);
  void set(c10::Device device, at::Tensor state);

 private:
  std::vector<std::pair<c10::Device, at::Tensor>> states_;
};

/// The autocast of one device type; `dtype` only where it is enabled.
struct Autocast {
  c10::DeviceType type;
  std::optional<at::ScalarType> dtype;
};

/// Returns the autocast of every device type.
std::vector<Autocast> autocast_now();

bool any_enabled(const std::vector<Autocast>& all);

/// Keeps the hooks of the caller away from what F saves for its own graph. F
/// may have hooks itself, as checkpointing does.
class WithoutSavedTensorHooks {
 public:
  WithoutSavedTensorHooks() {
    const auto& state = at::SavedTensorDefaultHooks::get_tls_state();
    if (!state.stack.empty()) {
      outer_ = state;
      at::impl::SavedTensorDefaultHooksTLS none;
      none.disabled_error_message = state.disabled_error_message;
      none.is_tracing = state.is_tracing;
      at::SavedTensorDefaultHooks::set_tls_state(none);
    }
  }
  ~WithoutSavedTensorHooks() {
    if (outer_) {
      at::SavedTensorDefaultHooks::set_tls_state(*outer_);
    }
  }
  WithoutSavedTensorHooks(const WithoutSavedTensorHooks&) = delete;
  WithoutSavedTensorHooks& operator=(const WithoutSavedTensorHooks&) = delete;

 private:
  std::optional<at::impl::SavedTensorDefaultHooksTLS> outer_;
};

/// Sets an autocast for as long as the guard lives. The cache of cast weights
/// stays off: a weight cast without grad must not be found by an operator that
/// needs its graph.
class AutocastGuard {
 public:
  explicit AutocastGuard(const std::vector<Autocast>& wanted);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  struct Outer {
    c10::DeviceType type;
    bool enabled;
    at::ScalarType dtype;
  };
  bool cache_;
  std::vector<Outer> outer_;
};

} // namespace torch_sm3::reversible
