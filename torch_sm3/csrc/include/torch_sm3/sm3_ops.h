// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The operators of SM3, memory-efficient adaptive optimization (arXiv
/// 1901.11150): Adagrad whose per-element sums are replaced by one number per
/// row, column, ... of a tensor. A matrix of m x n elements keeps m + n
/// numbers.

#include <torch_sm3/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torch_sm3 {

/// Options of one update; each is a keyword of
/// `torch.ops.torch_sm3.sm3_update_`.
struct SM3UpdateOptions {
  double momentum = 0.0;      ///< in [0, 1): u is averaged before it is applied
  double beta2 = 1.0;         ///< in (0, 1]: 1 sums the squares, less forgets
  std::optional<double> eps;  ///< added under the root; none: the preset's
  double weight_decay = 0.0;  ///< decoupled decay, at least 0
  bool maximize = false;      ///< ascend instead of descend
  std::string variant = "II"; ///< or "I"; "given": the accumulators are final
  std::string compat;         ///< or "google", "optax", "trax", "enealor"
  /// Per parameter: rank, view sizes, number of groups, one mask of view axes
  /// per group; or -1 for the automatic cover. Empty: automatic for all.
  std::vector<int64_t> covers;
  /// Per parameter: ordinal, global number of its first element, one stride per
  /// dimension. Empty: its place in the list, 0, contiguous.
  std::vector<int64_t> global_index;
  bool stochastic_rounding = false; ///< of bfloat16 weights and int8 momentum
  int64_t seed = 0;                 ///< of the stochastic rounding
  std::optional<at::Tensor> grad_scale; ///< gradients are divided by it
  std::optional<at::Tensor> found_inf;  ///< not 0: the update is a no-op
  std::optional<at::Tensor> skipped;    ///< int64, counts such no-ops
};

/// Makes the zero accumulators that `sm3_update_` needs for one parameter.
///
/// By default one vector per dimension that is not of size 1; one accumulator
/// of full size where that is not larger (scalars, vectors, 2 x 2, empty
/// tensors).
///
/// \param param  a floating point parameter
/// \param covers as in SM3UpdateOptions, of this parameter
/// \param compat as in SM3UpdateOptions: with a preset 2 x 2 is no exception
/// \return float32 tensors (float64 for a float64 parameter) on its device
TORCH_SM3_API std::vector<at::Tensor> sm3_accumulators(
    const at::Tensor& param,
    at::IntArrayRef covers = {},
    std::string_view compat = {});

/// Does one step of SM3 on a list of parameters, in place.
///
/// For each element with gradient g, with mu the accumulators that hold it:
/// nu = keep * min(mu) + add * g^2, u = g / sqrt(nu + eps), then
/// w = (1 - lr * weight_decay) * w - lr * u, and each mu becomes the largest nu
/// of its set. keep = add = 1 for beta2 = 1, else beta2 and 1 - beta2.
///
/// Everything is checked before anything is written.
///
/// \param params           parameters, on one device, any strides
/// \param grads            gradients of the same shapes, never written
/// \param accumulators     `sm3_accumulators` of each parameter, in order
/// \param momentum_buffers one per parameter, or none if momentum is 0
/// \param momentum_scales  none, or one per parameter: float32 scales of an
/// int8
///                         buffer, an empty tensor for another
/// \param compensations    none, or one per parameter: what rounding of a
/// 16-bit
///                         parameter lost, an empty tensor for another
/// \param steps            one int64 scalar per parameter, counted up
/// \param lr               learning rate, at least 0
/// \param options          everything else
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

/// The same with the learning rate in a tensor of one element.
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

/// Does one step of SM3 on the rows that a sparse gradient names, in place.
///
/// Momentum is not applied. In sum mode this is the dense step on the gradient
/// made dense, bit for bit.
///
/// \param param         parameter, any strides
/// \param indices       int64 [sparse dimensions, rows], of a coalesced
///                      gradient (one out of range is a ValueError on the CPU;
///                      on CUDA, where kernels see it later, a message and a
///                      trap)
/// \param values        gradients of the named rows
/// \param accumulators  `sm3_accumulators` of the parameter
/// \param compensations none, or one tensor as in `sm3_update_`
/// \param step          int64 scalar, counted up
/// \param lr            learning rate, at least 0
/// \param options       everything else
TORCH_SM3_API void sm3_sparse_update_(
    const at::Tensor& param,
    const at::Tensor& indices,
    const at::Tensor& values,
    at::TensorList accumulators,
    at::TensorList compensations,
    const at::Tensor& step,
    double lr,
    const SM3UpdateOptions& options = {});

/// The same with the learning rate in a tensor of one element.
TORCH_SM3_API void sm3_sparse_update_(
    const at::Tensor& param,
    const at::Tensor& indices,
    const at::Tensor& values,
    at::TensorList accumulators,
    at::TensorList compensations,
    const at::Tensor& step,
    const at::Tensor& lr,
    const SM3UpdateOptions& options = {});

/// Returns the largest squared gradient of each set, the first phase of variant
/// I where a parameter is sharded. What is not finite counts as zero.
///
/// \param grads      dense gradients
/// \param covers     as in SM3UpdateOptions
/// \param grad_scale gradients are divided by it
/// \return one tensor per accumulator, in order
TORCH_SM3_API std::vector<at::Tensor> sm3_maxima(
    at::TensorList grads,
    at::IntArrayRef covers = {},
    const std::optional<at::Tensor>& grad_scale = std::nullopt);

/// Sets `found` to 1 if any element of any gradient is NaN or infinite.
///
/// \param grads dense gradients
/// \param found float32 tensor of one element on their device
TORCH_SM3_API void
sm3_nonfinite_(at::TensorList grads, const at::Tensor& found);

} // namespace torch_sm3
