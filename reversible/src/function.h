// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// F of a half: a function that is run twice. It is a scripted module or a
/// torch::nn module; the engine knows neither.

#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace torch_sm3::reversible {

/// What earlier calls found out about a function.
class Learned {
 public:
  /// Returns for each buffer whether F changes it with these training flags, or
  /// nothing if it has not run with them.
  std::optional<std::vector<bool>>
  changed_buffers(const std::vector<bool>& flags, size_t buffers) const;

  void set_changed_buffers(
      const std::vector<bool>& flags,
      std::vector<bool> changed);

  /// F's graph holds no tensor that the engine does not know of.
  std::atomic<bool> graph_checked = false;
  /// It is known whether F's bits depend on grad mode.
  std::atomic<bool> probed = false;
  /// They do, so the first run has to be one with grad.
  std::atomic<bool> needs_grad_mode = false;

 private:
  mutable std::mutex mutex_;
  std::map<std::vector<bool>, std::vector<bool>> changed_;
};

/// All tensors and training flags of a function, at one moment.
class Inventory {
 public:
  std::vector<at::Tensor> owned; ///< tensors that require grad, each once

  virtual ~Inventory() = default;

  /// Returns the other tensors.
  virtual std::vector<at::Tensor> buffers() const = 0;

  /// Returns a buffer's value for a later `set_buffer`.
  virtual at::Tensor keep_buffer(size_t index) const = 0;

  /// Puts another value in the place of a buffer.
  ///
  /// \param index position among `buffers()`
  /// \param value the value; it is not copied
  virtual void set_buffer(size_t index, const at::Tensor& value) const = 0;

  virtual std::string buffer_name(size_t index) const = 0;

  /// Returns the training flag of each submodule.
  virtual std::vector<bool> training() const = 0;

  virtual void set_training(const std::vector<bool>& flags) const = 0;
};

/// A function of tensors.
class Function {
 public:
  virtual ~Function() = default;

  /// Runs it once.
  ///
  /// \param arguments tensors; an undefined one stands for None
  virtual std::vector<at::Tensor>
  operator()(const std::vector<at::Tensor>& arguments) const = 0;

  virtual std::unique_ptr<Inventory> inventory() const = 0;

  virtual Learned& learned() const = 0;
};

} // namespace torch_sm3::reversible
