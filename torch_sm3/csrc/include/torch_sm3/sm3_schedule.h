// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The learning rate that suits SM3: a warm-up, then constant.

#include <torch_sm3/export.h>

#include <torch/optim/schedulers/lr_scheduler.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace torch_sm3::optim {

/// Options of `WarmupConstantLR`.
struct WarmupConstantLROptions {
  /// Power of the warm-up: 2 is (t / warmup_steps)^2.
  double power = 2.0;
  /// Steps after which the rate is 0; without it, it stays.
  std::optional<int64_t> total_steps;
  /// Part of `total_steps`, at their end, over which the rate falls to 0.
  double cooldown_fraction = 0.0;
};

/// Raises the learning rates of an optimizer over the first steps, then keeps
/// them, optionally lets them fall in the last ones.
///
/// Step t = 1, 2, ... has the initial rate times
/// min(1, (t / warmup_steps)^power), and in the last C =
/// round(cooldown_fraction
/// * total_steps) steps times (total_steps - t + 1) / C. The constructor sets
/// the rates of t = 1; `step()`, after the optimizer's, those of the next.
class TORCH_SM3_API WarmupConstantLR : public torch::optim::LRScheduler {
 public:
  /// \param optimizer    outlives the scheduler
  /// \param warmup_steps steps until the initial rate is reached; 0 for none
  /// \param options      see WarmupConstantLROptions
  WarmupConstantLR(
      torch::optim::Optimizer& optimizer,
      int64_t warmup_steps,
      WarmupConstantLROptions options = {});

  /// Writes the step and the initial rates.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Continues where `save` was called, and sets the rates of that step.
  void load(torch::serialize::InputArchive& archive);

 protected:
  std::vector<double> get_lrs() override;

 private:
  double factor(int64_t t) const;

  std::vector<double> initial_;
  int64_t warmup_;
  WarmupConstantLROptions options_;
  int64_t cooldown_ = 0;
};

} // namespace torch_sm3::optim
