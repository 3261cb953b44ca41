// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// SM3, memory-efficient adaptive optimization (arXiv 1901.11150): Adagrad
/// whose per-element sums are replaced by one number per row, column, ... of a
/// tensor. A matrix of m x n elements keeps m + n numbers.

#include <torch_sm3/export.h>

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace torch_sm3 {

/// Makes the zero accumulators that `sm3_update_` needs for one parameter.
///
/// One vector per dimension that is not of size 1; one accumulator of full size
/// where that is not larger (scalars, vectors, 2 x 2, empty tensors).
///
/// \param param a floating point parameter
/// \return float32 tensors (float64 for a float64 parameter) on its device
TORCH_SM3_API std::vector<at::Tensor> sm3_accumulators(const at::Tensor& param);

/// Does one step of SM3-II on a list of parameters, in place.
///
/// For each element with gradient g, with mu the accumulators that hold it:
/// nu = keep * min(mu) + add * g^2, u = g / sqrt(nu + eps), then
/// w = (1 - lr * weight_decay) * w - lr * u, and each mu becomes the largest nu
/// of its set. keep = add = 1 for beta2 = 1, else beta2 and 1 - beta2.
///
/// Everything is checked before anything is written.
///
/// \param params           parameters, on one device type, any strides
/// \param grads            gradients of the same shapes, never written
/// \param accumulators     `sm3_accumulators` of each parameter, in order
/// \param momentum_buffers one per parameter, or none if momentum is 0
/// \param steps            one int64 CPU scalar per parameter, counted up
/// \param lr               learning rate, at least 0
/// \param momentum         in [0, 1): u is averaged before it is applied
/// \param beta2            in (0, 1]: 1 sums the squares, less forgets them
/// \param eps              added to nu under the root; 1e-30 if absent
/// \param weight_decay     decoupled decay, at least 0
/// \param maximize         ascend instead of descend
TORCH_SM3_API void sm3_update_(
    at::TensorList params,
    at::TensorList grads,
    at::TensorList accumulators,
    at::TensorList momentum_buffers,
    at::TensorList steps,
    double lr,
    double momentum = 0.0,
    double beta2 = 1.0,
    std::optional<double> eps = std::nullopt,
    double weight_decay = 0.0,
    bool maximize = false);

} // namespace torch_sm3
