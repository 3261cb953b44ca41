// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/check.h>
#include <torch_sm3/sm3_schedule.h>

#include <ATen/core/ivalue.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace torch_sm3::optim {
namespace {

int64_t cooldown_of(int64_t warmup, const WarmupConstantLROptions& o) {
  TORCH_SM3_CHECK_VALUE(
      warmup >= 0, "WarmupConstantLR", "warmup_steps", "a number >= 0", warmup);
  TORCH_SM3_CHECK_VALUE(
      std::isfinite(o.power) && o.power > 0,
      "WarmupConstantLR",
      "power",
      "a finite number > 0",
      o.power);
  TORCH_SM3_CHECK_VALUE(
      o.cooldown_fraction >= 0 && o.cooldown_fraction < 1,
      "WarmupConstantLR",
      "cooldown_fraction",
      "0 <= cooldown_fraction < 1",
      o.cooldown_fraction);
  TORCH_SM3_CHECK_VALUE(
      o.cooldown_fraction == 0 || o.total_steps.has_value(),
      "WarmupConstantLR",
      "total_steps",
      "a number with cooldown_fraction > 0",
      "none");
  if (!o.total_steps.has_value()) {
    return 0;
  }
  // To nearest even, as Python rounds.
  const auto cooldown = static_cast<int64_t>(std::nearbyint(
      o.cooldown_fraction * static_cast<double>(*o.total_steps)));
  TORCH_SM3_CHECK_VALUE(
      warmup + cooldown <= *o.total_steps,
      "WarmupConstantLR",
      "total_steps",
      c10::str("at least ", warmup + cooldown, " (warm-up and cool-down)"),
      *o.total_steps);
  return cooldown;
}

} // namespace

WarmupConstantLR::WarmupConstantLR(
    torch::optim::Optimizer& optimizer,
    int64_t warmup_steps,
    WarmupConstantLROptions options)
    : LRScheduler(optimizer),
      initial_(get_current_lrs()),
      warmup_(warmup_steps),
      options_(options),
      cooldown_(cooldown_of(warmup_steps, options)) {
  step();
}

double WarmupConstantLR::factor(int64_t t) const {
  double factor = 1;
  if (t < warmup_) {
    factor = std::pow(
        static_cast<double>(t) / static_cast<double>(warmup_), options_.power);
  }
  if (options_.total_steps.has_value()) {
    const int64_t left = *options_.total_steps - t + 1;
    if (left <= 0) {
      return 0;
    }
    if (left <= cooldown_) {
      factor *= static_cast<double>(left) / static_cast<double>(cooldown_);
    }
  }
  return factor;
}

std::vector<double> WarmupConstantLR::get_lrs() {
  const double now = factor(int64_t{step_count_} + 1);
  std::vector<double> rates = initial_;
  for (double& rate : rates) {
    rate *= now;
  }
  return rates;
}

void WarmupConstantLR::save(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(int64_t{step_count_}));
  archive.write("initial_lrs", c10::IValue(initial_));
}

void WarmupConstantLR::load(torch::serialize::InputArchive& archive) {
  c10::IValue count;
  c10::IValue initial;
  archive.read("step", count);
  archive.read("initial_lrs", initial);
  const auto rates = initial.toDoubleVector();
  TORCH_SM3_CHECK_VALUE(
      rates.size() == initial_.size(),
      "WarmupConstantLR",
      "archive",
      c10::str(initial_.size(), " parameter groups"),
      rates.size());
  initial_ = rates;
  // step() sets the rates of the next step, so go there from the one before.
  step_count_ = static_cast<unsigned>(count.toInt() - 1);
  step();
}

} // namespace torch_sm3::optim
