// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_sm3::reversible {

struct Steps;

/// Maps the top of a stack of tensors invertibly.
///
/// A block takes the first `n_in()` items of the stack and puts `n_out()` items
/// in their place; deeper items pass untouched. Called by itself it is ordinary
/// differentiable code; in a `Sequence` its inputs are rebuilt in the backward
/// pass.
class TORCH_SM3_API Block : public torch::nn::Module {
 public:
  size_t n_in() const;
  size_t n_out() const;

  /// \param stack at least `n_in()` tensors
  /// \param side  tensors that functions take besides; never rebuilt
  virtual std::vector<at::Tensor> forward(
      const std::vector<at::Tensor>& stack,
      const std::vector<at::Tensor>& side = {}) const;

  /// Returns the stack that `forward` maps to this one, up to rounding;
  /// differentiable.
  virtual std::vector<at::Tensor> inverse(
      const std::vector<at::Tensor>& stack,
      const std::vector<at::Tensor>& side = {}) const;

  const Steps& steps() const {
    return *steps_;
  }

 protected:
  Block(std::string name, std::shared_ptr<const Steps> steps);

  std::shared_ptr<const Steps> steps_;
};

/// Deep copies inside other modules, as `torch::nn::Cloneable` makes them.
template <class Derived>
class CloneableBlock : public Block {
  friend Derived;
  CloneableBlock(std::string name, std::shared_ptr<const Steps> steps)
      : Block(std::move(name), std::move(steps)) {}

  void clone_(torch::nn::Module& other, const std::optional<at::Device>& device)
      final {
    const auto copy = std::dynamic_pointer_cast<Derived>(other.clone(device));
    TORCH_CHECK(
        copy != nullptr,
        "clone: expected a module of the class ",
        name(),
        ", but got ",
        other.name());
    static_cast<Derived&>(*this) = *copy;
  }
};

/// A block in a list of different ones.
class AnyBlock {
 public:
  template <std::derived_from<Block> B>
  AnyBlock(std::shared_ptr<B> block) : block_(std::move(block)) {}

  /// \param holder such as `AdditiveCoupling(f, g)`
  template <class M>
  AnyBlock(const torch::nn::ModuleHolder<M>& holder) : block_(holder.ptr()) {}

  const std::shared_ptr<Block>& ptr() const {
    return block_;
  }

 private:
  std::shared_ptr<Block> block_;
};

using Blocks = std::vector<AnyBlock>;

} // namespace torch_sm3::reversible
