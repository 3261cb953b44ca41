// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The arguments of the operators of SM3 and their checks, shared by the CPU,
/// CUDA and Meta kernels. The operators are registered boxed, because three
/// kernels with four overloads of twenty arguments would say it all twelve
/// times.

#include <sm3_cover.h>
#include <sm3_math.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <vector>

namespace torch_sm3 {

/// Arguments of sm3_update_ or, with `indices`, of sm3_sparse_update_.
struct SM3Arguments {
  const char* op = "sm3_update_";
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads; ///< of a sparse update: the values
  std::vector<at::Tensor> accumulators;
  std::vector<at::Tensor> momentum_buffers;
  std::vector<at::Tensor> momentum_scales;
  std::vector<at::Tensor> compensations;
  std::vector<at::Tensor> steps;
  at::Tensor indices;           ///< undefined for a dense update
  std::optional<at::Tensor> lr; ///< of the overload with a tensor
  std::optional<double> eps;    ///< none: the preset's
  std::string variant;
  std::string compat;
  std::vector<int64_t> covers;
  std::vector<int64_t> global_index;
  bool stochastic_rounding = false;
  int64_t seed = 0;
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> found_inf;
  std::optional<at::Tensor> skipped;
  SM3Hyperparameters h; ///< whole after `check_sm3`

  bool sparse() const {
    return indices.defined();
  }
};

/// Takes the arguments of a call from the stack, by their names in the schema.
SM3Arguments
take_sm3_arguments(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// One parameter, its cover, and its place in the whole one.
struct SM3Item {
  size_t index;
  size_t first_accumulator;
  SM3Cover cover;
  int64_t ordinal;              ///< of the random numbers
  int64_t start;                ///< global number of the first element
  std::vector<int64_t> strides; ///< per dimension, of the global numbers
  bool part;                    ///< the view is larger: a flat range of it
};

/// Checks every argument, as ValueError, TypeError or RuntimeError, and fills
/// `h`. \return one item per parameter
std::vector<SM3Item> check_sm3(SM3Arguments& arguments);

/// Checks one parameter; `index` is its place in the list.
void check_sm3_param(const char* op, const at::Tensor& param, size_t index);

/// Checks one gradient without its parameter.
void check_sm3_grad(const char* op, const at::Tensor& grad, size_t index);

/// Checks a tensor of one real number, as a learning rate or a flag.
void check_sm3_number(
    const char* op,
    const char* name,
    const at::Tensor& number);

/// float64 for a float64 parameter, else float32: 16-bit sums would stall.
at::ScalarType sm3_accumulator_dtype(const at::Tensor& param);

/// True if the parameter has this tensor: an empty one stands for none.
bool sm3_present(const std::vector<at::Tensor>& list, const SM3Item& item);

/// Marks all written tensors as changed; kernels call it last.
void bump_sm3_versions(const SM3Arguments& arguments);

/// Checks the arguments of sm3_maxima. \return the cover of each gradient
std::vector<SM3Cover> check_sm3_maxima(
    at::TensorList grads,
    at::IntArrayRef covers,
    const std::optional<at::Tensor>& grad_scale);

/// An output of sm3_maxima, not filled.
at::Tensor
sm3_empty_maxima(const at::Tensor& grad, const SM3Cover& cover, size_t group);

/// Checks the arguments of sm3_nonfinite_.
void check_sm3_nonfinite(at::TensorList grads, const at::Tensor& found);

} // namespace torch_sm3
