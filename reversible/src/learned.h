// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What is known of scripted modules, kept beside them, because nothing may be
/// added to them.

#include <function.h>
#include <scripted.h>

#include <torch/csrc/jit/runtime/interpreter.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>

namespace torch_sm3::reversible {

/// What is known of one module.
class ScriptedModule {
 public:
  Learned learned;

  /// Returns `forward`, operator by operator, for today's autocast. Executors
  /// are kept out: once a module has run with optimisations, its own one draws
  /// dropout masks and rounds gradients in another way with grad than without.
  torch::jit::Code forward(const torch::jit::Function& method);

 private:
  std::mutex mutex_;
  // The graph depends on whether autocast is on for the CPU and for CUDA.
  std::array<std::optional<torch::jit::Code>, 4> codes_;
};

/// Returns what is known of a module; the same for as long as it lives.
std::shared_ptr<ScriptedModule> known_of(const ObjectPtr& module);

} // namespace torch_sm3::reversible
