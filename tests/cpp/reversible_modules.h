// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Small modules, losses and comparisons that the tests of reversible modules
/// share.

#include <torch_sm3/reversible/modules.h>

#include <ATen/Functions.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

namespace torch_sm3::reversible {

using Tensors = std::vector<at::Tensor>;

inline torch::nn::Sequential mlp(int64_t width, double dropout = 0) {
  return torch::nn::Sequential(
      torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})),
      torch::nn::Linear(width, 2 * width),
      torch::nn::Dropout(dropout),
      torch::nn::Linear(2 * width, width));
}

inline Tensors streams(
    size_t count,
    at::ScalarType type = at::kDouble,
    at::IntArrayRef sizes = {4, 6}) {
  Tensors result;
  for (size_t i = 0; i < count; ++i) {
    result.push_back(at::randn(sizes, type).requires_grad_());
  }
  return result;
}

/// A number on which every element of every output counts differently.
inline at::Tensor loss_of(const Tensors& outputs) {
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (const at::Tensor& y : outputs) {
    const at::Tensor x = y.to(at::kDouble);
    loss = loss + (x.sin() * x).sum() * static_cast<double>(1 + y.numel() % 7);
  }
  return loss;
}

inline Tensors
gradients(const at::Tensor& loss, Tensors inputs, const Tensors& parameters) {
  inputs.insert(inputs.end(), parameters.begin(), parameters.end());
  return torch::autograd::grad(
      {loss}, inputs, {}, std::nullopt, false, /*allow_unused=*/true);
}

inline void
expect_close(const Tensors& a, const Tensors& b, double tolerance = 1e-9) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].defined(), b[i].defined()) << i;
    EXPECT_TRUE(
        !a[i].defined() || at::allclose(a[i], b[i], tolerance, tolerance))
        << i;
  }
}

inline void expect_equal(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::equal(a[i], b[i])) << i;
  }
}

/// Counts the bytes that are alive, and were at most, on this thread and on
/// those of autograd.
class MemoryMeter : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(
      void* /*ptr*/,
      int64_t size,
      size_t /*allocated*/,
      size_t /*reserved*/,
      c10::Device /*device*/) override {
    const int64_t now = live += size;
    int64_t old = peak;
    while (old < now && !peak.compare_exchange_weak(old, now)) {
    }
  }
  bool memoryProfilingEnabled() const override {
    return true;
  }

  std::atomic<int64_t> live = 0;
  std::atomic<int64_t> peak = 0;
};

/// Returns what is alive after `work` of what it allocated.
inline int64_t live_after(const std::function<void(MemoryMeter&)>& work) {
  const auto meter = std::make_shared<MemoryMeter>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, meter);
  work(*meter);
  return meter->live;
}

} // namespace torch_sm3::reversible
