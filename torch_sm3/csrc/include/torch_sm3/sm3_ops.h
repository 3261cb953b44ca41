// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// One step of SM3 on lists of tensors; the optimizer is in sm3_optimizer.h.

#include <torch_sm3/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torch_sm3 {

/// Options of `sm3_update_` and `sm3_sparse_update_`, the same for all tensors.
struct SM3UpdateOptions {
  double momentum = 0;
  double beta2 = 1;
  std::optional<double> eps;
  double weight_decay = 0;
  bool maximize = false;
  std::string variant = "II";
  std::string compat;
  std::vector<int64_t> covers;
  std::vector<int64_t> global_index;
  bool stochastic_rounding = false;
  int64_t seed = 0;
  std::optional<at::Tensor> grad_scale, found_inf, skipped;
};

/// Does one step on a list of parameters, in place.
TORCH_SM3_API void sm3_update_(
    at::TensorList params,
    at::TensorList grads,
    at::TensorList accumulators,
    at::TensorList momentum_buffers,
    at::TensorList momentum_scales,
    at::TensorList compensations,
    at::TensorList steps,
    double lr,
    const SM3UpdateOptions& options = {});

/// Does one step with a learning rate that is a tensor.
TORCH_SM3_API void sm3_update_(
    at::TensorList params,
    at::TensorList grads,
    at::TensorList accumulators,
    at::TensorList momentum_buffers,
    at::TensorList momentum_scales,
    at::TensorList compensations,
    at::TensorList steps,
    const at::Tensor& lr,
    const SM3UpdateOptions& options = {});

/// Does one step on one parameter with the gradient of a coalesced COO tensor.
TORCH_SM3_API void sm3_sparse_update_(
    const at::Tensor& param,
    const at::Tensor& indices,
    const at::Tensor& values,
    at::TensorList accumulators,
    at::TensorList compensations,
    const at::Tensor& step,
    double lr,
    const SM3UpdateOptions& options = {});

/// Does one sparse step with a learning rate that is a tensor.
TORCH_SM3_API void sm3_sparse_update_(
    const at::Tensor& param,
    const at::Tensor& indices,
    const at::Tensor& values,
    at::TensorList accumulators,
    at::TensorList compensations,
    const at::Tensor& step,
    const at::Tensor& lr,
    const SM3UpdateOptions& options = {});

/// Makes the zero accumulators of one parameter.
TORCH_SM3_API std::vector<at::Tensor> sm3_accumulators(
    const at::Tensor& param,
    at::IntArrayRef covers = {},
    std::string_view compat = "");

/// Finds the largest squared gradient of each set of each cover.
TORCH_SM3_API std::vector<at::Tensor> sm3_maxima(
    at::TensorList grads,
    at::IntArrayRef covers = {},
    const std::optional<at::Tensor>& grad_scale = std::nullopt);

/// Sets `found` to 1 if any element of any gradient is NaN or infinite.
TORCH_SM3_API void
sm3_nonfinite_(at::TensorList grads, const at::Tensor& found);

} // namespace torch_sm3
