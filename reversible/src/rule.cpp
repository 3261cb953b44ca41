// SPDX-License-Identifier: Apache-2.0
#include <rule.h>
#include <torch_sm3/reversible/affine.h>
#include <torch_sm3/reversible/grid.h>
#include <torch_sm3/reversible/residual.h>

#include <ATen/ops/real.h>

#include <tuple>

namespace torch_sm3::reversible {
namespace {

using at::Tensor;
using Values = std::vector<Tensor>;

// As the gradient of a cast.
Tensor cast_grad(const Tensor& grad, const Tensor& value) {
  if (grad.is_complex() && !value.is_complex()) {
    return at::real(grad).to(value.scalar_type());
  }
  return grad.to(value.scalar_type());
}

void check_tensor(
    const Tensor& value,
    const Tensor& acc,
    const std::string& name) {
  TORCH_CHECK_TYPE(
      value.is_floating_point() || (value.is_complex() && acc.is_complex()),
      "reversible: expected F of ",
      name,
      " to return a floating tensor for an accumulator of ",
      acc.scalar_type(),
      ", but got ",
      value.scalar_type(),
      " (argument 'f')");
  TORCH_CHECK_VALUE(
      value.sym_sizes() == acc.sym_sizes(),
      "reversible: expected F of ",
      name,
      " to return the accumulator's shape ",
      acc.sym_sizes(),
      ", but got ",
      value.sym_sizes(),
      " (argument 'f')");
  TORCH_CHECK_VALUE(
      value.device() == acc.device(),
      "reversible: expected F of ",
      name,
      " to return a tensor on ",
      acc.device(),
      ", but got ",
      value.device(),
      " (argument 'f')");
}

} // namespace

Values rule_values(
    const Rule& rule,
    const Values& returned,
    const Tensor& acc,
    const std::string& name) {
  const bool pair = rule.kind == Rule::Kind::kAffine;
  const size_t wanted = pair ? 2 : 1;
  Values values = returned;
  if (pair && returned.size() == 1 && returned[0].dim() > 0) {
    const int64_t width = returned[0].size(-1);
    TORCH_CHECK_VALUE(
        width % 2 == 0,
        "reversible: expected F of ",
        name,
        " to return scale and shift, or both in one tensor of twice the "
        "width, but got the width ",
        width,
        " (argument 'f')");
    values = {
        returned[0].narrow(-1, 0, width / 2),
        returned[0].narrow(-1, width / 2, width / 2)};
  }
  TORCH_CHECK_TYPE(
      values.size() == wanted,
      "reversible: expected F of ",
      name,
      " to return ",
      pair ? "scale and shift" : "one tensor",
      ", but got ",
      returned.size(),
      " tensors (argument 'f')");
  for (const Tensor& value : values) {
    TORCH_CHECK_TYPE(
        value.defined(),
        "reversible: expected F of ",
        name,
        " to return a tensor, but got an undefined one (argument 'f')");
    check_tensor(value, acc, name);
  }
  return values;
}

Tensor apply_rule(
    const Rule& rule,
    const Tensor& acc,
    const Values& values,
    Tensor* amax) {
  switch (rule.kind) {
    case Rule::Kind::kGrid: {
      auto [out, largest] = reversible_grid_add(acc, values[0], rule.bits);
      if (amax != nullptr) {
        *amax = largest;
      }
      return out;
    }
    case Rule::Kind::kAffine:
      return reversible_affine(
          acc,
          values[0].to(acc.scalar_type()),
          values[1].to(acc.scalar_type()),
          rule.number);
    case Rule::Kind::kMomentum:
      return acc.mul(rule.number)
          .add(values[0].to(acc.scalar_type()), 1 - rule.number);
    default:
      return reversible_add(acc, values[0]);
  }
}

Tensor undo_rule(const Rule& rule, const Tensor& out, const Values& values) {
  switch (rule.kind) {
    case Rule::Kind::kGrid:
      return reversible_grid_sub(out, values[0], rule.bits);
    case Rule::Kind::kAffine:
      return reversible_affine_inverse(
          out,
          values[0].to(out.scalar_type()),
          values[1].to(out.scalar_type()),
          rule.number);
    case Rule::Kind::kMomentum:
      return out.sub(values[0].to(out.scalar_type()), 1 - rule.number)
          .div(rule.number);
    default:
      return reversible_sub(out, values[0]);
  }
}

RuleGrads rule_backward(
    const Rule& rule,
    const Tensor& grad,
    const Tensor& acc,
    const Values& values) {
  switch (rule.kind) {
    case Rule::Kind::kAffine: {
      auto [acc_grad, scale_grad] = reversible_affine_backward(
          grad, acc, values[0].to(acc.scalar_type()), rule.number);
      return {
          acc_grad,
          {cast_grad(scale_grad, values[0]), cast_grad(grad, values[1])}};
    }
    case Rule::Kind::kMomentum:
      return {
          grad.mul(rule.number),
          {cast_grad(grad.mul(1 - rule.number), values[0])}};
    default:
      return {grad, {cast_grad(grad, values[0])}};
  }
}

} // namespace torch_sm3::reversible
