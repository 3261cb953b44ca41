// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// How a half changes its accumulator `a` by the values of F, and back.
///
/// | rule      | F         | forward                   | inverse             |
/// |-----------|-----------|---------------------------|---------------------|
/// | add       | f         | a + f                     | y - f               |
/// | grid      | f         | a + q(f)                  | y - q(f)            |
/// | affine    | r, t      | a*exp(s) + t              | (y - t)*exp(-s)     |
/// | momentum  | f         | g*a + (1 - g)*f           | (y - (1 - g)*f)/g   |
///
/// where `q` rounds to the grid, `s = k*tanh(r/k)` for the clamp `k`, and `g`
/// is gamma.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_sm3::reversible {

struct Rule {
  enum class Kind : uint8_t { kAdd, kGrid, kAffine, kMomentum };

  Kind kind = Kind::kAdd;
  double number = 0; ///< clamp or gamma
  int64_t bits = 0;  ///< of the grid
};

/// Checks what F returned and returns the values that the rule takes.
///
/// \param returned one tensor; for affine two, or one of twice the width
/// \param acc      accumulator, whose shape and device each value must have
/// \param name     how messages call the half
std::vector<at::Tensor> rule_values(
    const Rule& rule,
    const std::vector<at::Tensor>& returned,
    const at::Tensor& acc,
    const std::string& name);

/// Returns the new accumulator; differentiable.
///
/// \param amax takes the largest magnitude of a sum on the grid
at::Tensor apply_rule(
    const Rule& rule,
    const at::Tensor& acc,
    const std::vector<at::Tensor>& values,
    at::Tensor* amax = nullptr);

/// Returns the old accumulator, up to rounding; differentiable.
at::Tensor undo_rule(
    const Rule& rule,
    const at::Tensor& out,
    const std::vector<at::Tensor>& values);

struct RuleGrads {
  at::Tensor acc;
  std::vector<at::Tensor> values; // in the dtypes of the values
};

/// Returns the gradients of `apply_rule`.
RuleGrads rule_backward(
    const Rule& rule,
    const at::Tensor& grad,
    const at::Tensor& acc,
    const std::vector<at::Tensor>& values);

} // namespace torch_sm3::reversible
