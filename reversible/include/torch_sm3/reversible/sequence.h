// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>
#include <torch_sm3/reversible/block.h>

#include <torch/arg.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torch_sm3::reversible {

/// Options of a Sequence.
struct TORCH_SM3_API SequenceOptions {
  /// "none"; "grid" rounds streams and residuals to multiples of 2^-grid_bits;
  /// "sidecar" keeps the rounding errors. With the last two, rebuilt streams
  /// and gradients have the bits of the plan "store".
  TORCH_ARG(std::string, exact) = "none";
  TORCH_ARG(int64_t, grid_bits) = 16;
  /// "reversible", or "store" for ordinary autograd.
  TORCH_ARG(std::string, plan) = "reversible";
  /// What an exact mode does where it cannot rebuild: "store" keeps the input
  /// of that half, "raise" is a ValueError.
  TORCH_ARG(std::string, overflow) = "store";
  /// Permits more than four additions to a 16-bit stream without an exact mode.
  TORCH_ARG(bool, allow_drift) = false;
};

/// Blocks one after the other, whose activations are rebuilt in the backward
/// pass instead of kept.
///
/// Without grad, and where nothing requires it, it is a bare loop. One sequence
/// may be used from several threads.
class TORCH_SM3_API SequenceImpl : public CloneableBlock<SequenceImpl> {
 public:
  /// \param blocks  blocks; those of sequences among them are taken apart
  /// \param options see SequenceOptions
  explicit SequenceImpl(
      const Blocks& blocks = {},
      const SequenceOptions& options = {});

  /// \param stack tensors of one device that the blocks change, and any others
  /// \param side  tensors that functions take besides; see HalfResidualOptions
  std::vector<at::Tensor> forward(
      const std::vector<at::Tensor>& stack,
      const std::vector<at::Tensor>& side = {}) const override;

  /// Returns the stack that `forward` maps to this one.
  std::vector<at::Tensor> inverse(
      const std::vector<at::Tensor>& stack,
      const std::vector<at::Tensor>& side = {}) const override;

  std::shared_ptr<torch::nn::Module>
  clone(const std::optional<at::Device>& device = std::nullopt) const override;

  size_t size() const {
    return blocks_.size();
  }

  const std::shared_ptr<Block>& operator[](size_t index) const {
    return blocks_.at(index).ptr();
  }

  const SequenceOptions& options() const {
    return options_;
  }

  /// How many halves had their input kept because of an overflow, so far.
  int64_t kept() const {
    return *kept_;
  }

 private:
  bool requires_grad(
      const std::vector<at::Tensor>& stack,
      const std::vector<at::Tensor>& side) const;

  SequenceOptions options_;
  Blocks blocks_;
  std::shared_ptr<std::atomic<int64_t>> kept_;
};

/// A `ModuleHolder` for `SequenceImpl`.
TORCH_MODULE(Sequence);

} // namespace torch_sm3::reversible
