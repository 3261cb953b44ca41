// SPDX-License-Identifier: Apache-2.0

/// \file
/// Gradients of the grid operators: rounding passes them straight through.

#include <torch_sm3/reversible/grid.h>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace torch_sm3::reversible {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

struct QuantizeFunction : torch::autograd::Function<QuantizeFunction> {
  static at::Tensor
  forward(AutogradContext* ctx, const at::Tensor& x, int64_t bits) {
    ctx->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return reversible_quantize(x, bits);
  }

  static tensor_list backward(AutogradContext*, const tensor_list& grads) {
    return {grads[0], at::Tensor()};
  }
};

struct GridFunction : torch::autograd::Function<GridFunction> {
  static tensor_list forward(
      AutogradContext* ctx,
      const at::Tensor& acc,
      const at::Tensor& value,
      int64_t bits,
      bool subtract) {
    ctx->saved_data["subtract"] = subtract;
    ctx->saved_data["type"] = static_cast<int64_t>(value.scalar_type());
    ctx->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (subtract) {
      return {reversible_grid_sub(acc, value, bits)};
    }
    auto [out, amax] = reversible_grid_add(acc, value, bits);
    ctx->mark_non_differentiable({amax});
    return {out, amax};
  }

  static tensor_list backward(AutogradContext* ctx, const tensor_list& grads) {
    const at::Tensor& grad = grads[0];
    at::Tensor value_grad;
    if (grad.defined() && ctx->needs_input_grad(1)) {
      const auto type =
          static_cast<at::ScalarType>(ctx->saved_data["type"].toInt());
      value_grad = ctx->saved_data["subtract"].toBool() ? grad.neg() : grad;
      value_grad = value_grad.to(type);
    }
    return {grad, value_grad, at::Tensor(), at::Tensor()};
  }
};

at::Tensor quantize_autograd(const at::Tensor& x, int64_t bits) {
  return QuantizeFunction::apply(x, bits);
}

std::tuple<at::Tensor, at::Tensor>
add_autograd(const at::Tensor& acc, const at::Tensor& value, int64_t bits) {
  const tensor_list outputs = GridFunction::apply(acc, value, bits, false);
  return {outputs[0], outputs[1]};
}

at::Tensor
sub_autograd(const at::Tensor& acc, const at::Tensor& value, int64_t bits) {
  return GridFunction::apply(acc, value, bits, true)[0];
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, Autograd, m) {
  m.impl("reversible_quantize", &quantize_autograd);
  m.impl("reversible_grid_add", &add_autograd);
  m.impl("reversible_grid_sub", &sub_autograd);
}

} // namespace torch_sm3::reversible
