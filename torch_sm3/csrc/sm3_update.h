// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What the CPU, CUDA and Meta kernels of sm3_update_ share: the cover of a
/// shape, the checks, and one parameter seen as rows.

#include <sm3_math.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace torch_sm3 {

/// The sets of elements that share a number.
struct SM3Cover {
  std::vector<int64_t> dims;     ///< dimensions of the tensor that are not 1
  std::vector<c10::SymInt> view; ///< their sizes
  bool diagonal;                 ///< every element is a set of its own

  /// Shape of accumulator `index`.
  std::vector<c10::SymInt> shape(size_t index) const;
  /// Number of accumulators.
  size_t count() const;
};

SM3Cover sm3_cover(c10::SymIntArrayRef sizes);

/// Arguments of sm3_update_, by reference.
struct SM3Arguments {
  at::TensorList params;
  at::TensorList grads;
  at::TensorList accumulators;
  at::TensorList momentum_buffers;
  at::TensorList steps;
  SM3Hyperparameters hyperparameters;
};

/// One parameter, its cover, and where its accumulators start in the list.
struct SM3Item {
  size_t index;
  size_t first_accumulator;
  SM3Cover cover;
};

/// Checks every argument, as ValueError, TypeError or RuntimeError.
/// \return one item per parameter
std::vector<SM3Item> check_sm3_update(const SM3Arguments& arguments);

/// Checks one parameter; `index` is its place in the list.
void check_sm3_param(const at::Tensor& param, size_t index);

/// float64 for a float64 parameter, else float32: 16-bit sums would stall.
at::ScalarType sm3_accumulator_dtype(const at::Tensor& param);

/// Marks all written tensors as changed; kernels call it last.
void bump_sm3_versions(const SM3Arguments& arguments);

SM3Hyperparameters sm3_hyperparameters(
    double lr,
    double momentum,
    double beta2,
    std::optional<double> eps,
    double weight_decay,
    bool maximize);

/// Sizes, strides and memory of one parameter on a device, as kernels see it.
struct SM3Layout {
  std::vector<int64_t> sizes; ///< of the view, never empty
  std::vector<int64_t> param_strides, grad_strides, momentum_strides;
  void* param;
  const void* grad;
  void* momentum; ///< null without momentum
  ScalarKind param_kind, grad_kind;
  bool diagonal;
};

SM3Layout sm3_layout(const SM3Arguments& arguments, const SM3Item& item);

} // namespace torch_sm3
