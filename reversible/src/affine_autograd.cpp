// SPDX-License-Identifier: Apache-2.0

/// \file
/// Gradients of the affine operators, of every order: what each backward calls
/// is differentiable itself.

#include <torch_sm3/reversible/affine.h>
#include <torch_sm3/reversible/residual.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/tanh.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace torch_sm3::reversible {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

void save_shift_type(AutogradContext* ctx, const at::Tensor& shift) {
  ctx->saved_data["shift"] = static_cast<int64_t>(shift.scalar_type());
}

at::Tensor as_shift(AutogradContext* ctx, const at::Tensor& grad) {
  return grad.to(static_cast<at::ScalarType>(ctx->saved_data["shift"].toInt()));
}

struct ForwardFunction : torch::autograd::Function<ForwardFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& acc,
      const at::Tensor& scale,
      const at::Tensor& shift,
      double clamp) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({acc, scale});
    ctx->saved_data["clamp"] = clamp;
    save_shift_type(ctx, shift);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return reversible_affine(acc, scale, shift, clamp);
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    tensor_list result(4);
    if (!grads[0].defined()) {
      return result;
    }
    const tensor_list saved = ctx->get_saved_variables();
    std::tie(result[0], result[1]) = reversible_affine_backward(
        grads[0], saved[0], saved[1], ctx->saved_data["clamp"].toDouble());
    result[2] = as_shift(ctx, grads[0]);
    return result;
  }
};

struct InverseFunction : torch::autograd::Function<InverseFunction> {
  static at::Tensor forward(
      AutogradContext* ctx,
      const at::Tensor& out,
      const at::Tensor& scale,
      const at::Tensor& shift,
      double clamp) {
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({out, scale, shift});
    ctx->saved_data["clamp"] = clamp;
    save_shift_type(ctx, shift);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return reversible_affine_inverse(out, scale, shift, clamp);
  }

  // s is odd: with the scale's sign turned, the inverse is the forward of
  // `out - shift`.
  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    tensor_list result(4);
    if (!grads[0].defined()) {
      return result;
    }
    const tensor_list saved = ctx->get_saved_variables();
    std::tie(result[0], result[1]) = reversible_affine_backward(
        grads[0],
        reversible_sub(saved[0], saved[2]),
        saved[1].neg(),
        ctx->saved_data["clamp"].toDouble());
    result[1] = result[1].neg();
    result[2] = as_shift(ctx, result[0].neg());
    return result;
  }
};

// With t = tanh(r / k), E = exp(k t) and D = 1 - t^2, the gradients are
// g E and g a E D; u and v are the gradients of these two.
struct BackwardFunction : torch::autograd::Function<BackwardFunction> {
  static tensor_list forward(
      AutogradContext* ctx,
      const at::Tensor& grad,
      const at::Tensor& acc,
      const at::Tensor& scale,
      double clamp) {
    ctx->save_for_backward({grad, acc, scale});
    ctx->saved_data["clamp"] = clamp;
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [grad_acc, grad_scale] =
        reversible_affine_backward(grad, acc, scale, clamp);
    return {grad_acc, grad_scale};
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const tensor_list saved = ctx->get_saved_variables();
    const double k = ctx->saved_data["clamp"].toDouble();
    // As in the operators, 16 bits are widened.
    const at::ScalarType type =
        saved[1].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const at::Tensor u = grads[0].to(type);
    const at::Tensor v = grads[1].to(type);
    const at::Tensor g = saved[0].to(type);
    const at::Tensor a = saved[1].to(type);
    const at::Tensor t = at::tanh(saved[2].to(type) / k);
    const at::Tensor e = at::exp(k * t);
    const at::Tensor d = 1 - t * t;
    const at::Tensor sum = e * (u + v * a * d);
    const at::Tensor of_scale = g * d * (sum - 2 / k * v * a * e * t);
    return {
        sum.to(saved[0].scalar_type()),
        (v * g * e * d).to(saved[1].scalar_type()),
        of_scale.to(saved[2].scalar_type()),
        at::Tensor()};
  }
};

at::Tensor forward_autograd(
    const at::Tensor& acc,
    const at::Tensor& scale,
    const at::Tensor& shift,
    double clamp) {
  return ForwardFunction::apply(acc, scale, shift, clamp);
}

at::Tensor inverse_autograd(
    const at::Tensor& out,
    const at::Tensor& scale,
    const at::Tensor& shift,
    double clamp) {
  return InverseFunction::apply(out, scale, shift, clamp);
}

std::tuple<at::Tensor, at::Tensor> backward_autograd(
    const at::Tensor& grad,
    const at::Tensor& acc,
    const at::Tensor& scale,
    double clamp) {
  const tensor_list grads = BackwardFunction::apply(grad, acc, scale, clamp);
  return {grads[0], grads[1]};
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, Autograd, m) {
  m.impl("reversible_affine", &forward_autograd);
  m.impl("reversible_affine_inverse", &inverse_autograd);
  m.impl("reversible_affine_backward", &backward_autograd);
}

} // namespace torch_sm3::reversible
