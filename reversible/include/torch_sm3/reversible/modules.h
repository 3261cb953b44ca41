// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Reversible blocks as `torch::nn` modules.
///
/// \code
/// using namespace torch_sm3::reversible;
/// Sequence model(Blocks{
///     AdditiveCoupling(torch::nn::Linear(8, 8), torch::nn::Linear(8, 8)),
///     Swap(),
///     HalfResidual(torch::nn::Linear(8, 8))},
///     SequenceOptions().exact("grid"));
/// const auto y = model->forward({x1, x2});
/// (y[0] * y[1]).sum().backward();
/// \endcode

#include <torch_sm3/export.h>
#include <torch_sm3/reversible/block.h>
#include <torch_sm3/reversible/module_function.h>
#include <torch_sm3/reversible/sequence.h>

#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace torch_sm3::reversible {

/// Options of a HalfResidual.
struct TORCH_SM3_API HalfResidualOptions {
  /// How many items after the accumulator F takes.
  TORCH_ARG(int64_t, n_context) = 1;
  /// Which of the call's side tensors F takes after those.
  TORCH_ARG(std::vector<int64_t>, side) = {};
};

/// Adds a function of the other streams to the first one:
/// `y = a + F(c_1, ..., c_n)`, the context unchanged.
class TORCH_SM3_API HalfResidualImpl : public CloneableBlock<HalfResidualImpl> {
 public:
  /// \param f       takes the context, then the side tensors
  /// \param options see HalfResidualOptions
  explicit HalfResidualImpl(
      ModuleFunction f,
      const HalfResidualOptions& options = {});

  std::shared_ptr<torch::nn::Module>
  clone(const std::optional<at::Device>& device = std::nullopt) const override;

 private:
  ModuleFunction f_;
  HalfResidualOptions options_;
};

/// A `ModuleHolder` for `HalfResidualImpl`.
TORCH_MODULE(HalfResidual);

/// Couples two streams by two functions: `y1 = x1 + F(x2)`, `y2 = x2 + G(y1)`.
class TORCH_SM3_API AdditiveCouplingImpl
    : public CloneableBlock<AdditiveCouplingImpl> {
 public:
  /// \param f function of one stream
  /// \param g function of one stream
  AdditiveCouplingImpl(ModuleFunction f, ModuleFunction g);

  std::shared_ptr<torch::nn::Module>
  clone(const std::optional<at::Device>& device = std::nullopt) const override;

 private:
  ModuleFunction f_, g_;
};

/// A `ModuleHolder` for `AdditiveCouplingImpl`.
TORCH_MODULE(AdditiveCoupling);

/// Options of an AffineCoupling.
struct TORCH_SM3_API AffineCouplingOptions {
  /// The factor is between exp(-clamp) and exp(clamp); greater than 0.
  TORCH_ARG(double, clamp) = 2.0;
};

/// Couples two streams by factors and shifts: `(r, t) = F(x2)`,
/// `y1 = x1 * exp(clamp * tanh(r / clamp)) + t`, then the same of `x2` by G.
class TORCH_SM3_API AffineCouplingImpl
    : public CloneableBlock<AffineCouplingImpl> {
 public:
  /// \param f       returns scale and shift, or both in one tensor whose last
  ///                dimension is twice as wide, the scale first
  /// \param g       likewise
  /// \param options see AffineCouplingOptions
  AffineCouplingImpl(
      ModuleFunction f,
      ModuleFunction g,
      const AffineCouplingOptions& options = {});

  std::shared_ptr<torch::nn::Module>
  clone(const std::optional<at::Device>& device = std::nullopt) const override;

 private:
  ModuleFunction f_, g_;
  AffineCouplingOptions options_;
};

/// A `ModuleHolder` for `AffineCouplingImpl`.
TORCH_MODULE(AffineCoupling);

/// Options of a MomentumCoupling.
struct TORCH_SM3_API MomentumCouplingOptions {
  /// Between 0 and 1. Rounding errors grow by 1/gamma in each block.
  TORCH_ARG(double, gamma) = 0.9;
};

/// A residual step with momentum on `(x, v)`:
/// `v' = gamma * v + (1 - gamma) * F(x)`, `x' = x + v'`.
class TORCH_SM3_API MomentumCouplingImpl
    : public CloneableBlock<MomentumCouplingImpl> {
 public:
  /// \param f       function of `x`
  /// \param options see MomentumCouplingOptions
  explicit MomentumCouplingImpl(
      ModuleFunction f,
      const MomentumCouplingOptions& options = {});

  std::shared_ptr<torch::nn::Module>
  clone(const std::optional<at::Device>& device = std::nullopt) const override;

 private:
  ModuleFunction f_;
  MomentumCouplingOptions options_;
};

/// A `ModuleHolder` for `MomentumCouplingImpl`.
TORCH_MODULE(MomentumCoupling);

/// Couples n streams by n functions: `y_0 = x_0 + F_0(x_1 + ... + x_{n-1})`,
/// `y_i = x_i + F_i(y_{i-1})`.
class TORCH_SM3_API GroupCouplingImpl
    : public CloneableBlock<GroupCouplingImpl> {
 public:
  /// \param fs two or more functions of one stream
  explicit GroupCouplingImpl(std::vector<ModuleFunction> fs);

  std::shared_ptr<torch::nn::Module>
  clone(const std::optional<at::Device>& device = std::nullopt) const override;

 private:
  std::vector<ModuleFunction> fs_;
};

/// A `ModuleHolder` for `GroupCouplingImpl`.
TORCH_MODULE(GroupCoupling);

/// Permutes or duplicates the first items of the stack.
class TORCH_SM3_API SelectImpl : public CloneableBlock<SelectImpl> {
 public:
  /// \param indices items of the new top of the stack; each old one must occur
  /// \param n_in    how many items are taken; by default one more than the
  ///                greatest index
  explicit SelectImpl(
      std::vector<int64_t> indices,
      std::optional<int64_t> n_in = std::nullopt);

  std::shared_ptr<torch::nn::Module>
  clone(const std::optional<at::Device>& device = std::nullopt) const override;

 private:
  std::vector<int64_t> indices_;
};

/// A `ModuleHolder` for `SelectImpl`.
TORCH_MODULE(Select);

/// Swaps the first two items of the stack.
class TORCH_SM3_API SwapImpl : public CloneableBlock<SwapImpl> {
 public:
  SwapImpl();

  std::shared_ptr<torch::nn::Module>
  clone(const std::optional<at::Device>& device = std::nullopt) const override;
};

/// A `ModuleHolder` for `SwapImpl`.
TORCH_MODULE(Swap);

} // namespace torch_sm3::reversible
