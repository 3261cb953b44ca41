// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What F's recompute must see again: generators, autocast, training flags,
/// buffers and weights. The twin of torch_sm3/reversible/_replay.py.

#include <function.h>
#include <world.h>

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_sm3::reversible {

/// One F's first run, to be run again with the same outcome.
class Replay {
 public:
  /// \param function F, which must outlive this, as must its name
  /// \param name     how messages call it
  Replay(const Function& function, const std::string& name);

  /// The tensors that required grad in the first run.
  const std::vector<at::Tensor>& owned() const {
    return inventory_->owned;
  }

  /// Runs F and records what it needs to be run again.
  ///
  /// \param run       runs F
  /// \param arguments all tensors that F is given
  /// \param states    generator states after the previous F; updated. They
  ///                  spare a snapshot, because nothing but F draws in between
  std::vector<at::Tensor> first(
      const std::function<std::vector<at::Tensor>()>& run,
      at::TensorList arguments,
      GeneratorStates& states);

  /// Runs F in the world of the first run and restores today's, also on throw.
  ///
  /// \param run runs F
  std::vector<at::Tensor>
  again(const std::function<std::vector<at::Tensor>()>& run) const;

 private:
  void check_weights(const Inventory& now) const;
  void record_buffers(
      const std::vector<at::Tensor>& before,
      const std::vector<at::Tensor>& copies,
      const std::vector<int64_t>& versions,
      const std::optional<std::vector<bool>>& known);

  const Function& function_;
  const std::string& name_;
  std::unique_ptr<Inventory> inventory_;
  std::vector<bool> flags_;
  std::vector<int64_t> versions_;
  std::vector<Autocast> autocast_;
  std::vector<std::pair<size_t, at::Tensor>> buffers_;
  std::vector<std::pair<c10::Device, at::Tensor>> states_;
};

} // namespace torch_sm3::reversible
