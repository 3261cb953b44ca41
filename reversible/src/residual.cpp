// SPDX-License-Identifier: Apache-2.0
#include <dense.h>
#include <find_operator.h>
#include <instruction_sets.h>
#include <residual_layout.h>
#include <scalar_kind.h>
#include <torch_sm3/library.h>
#include <torch_sm3/reversible/residual.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/real.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace torch_sm3::reversible {
namespace {

bool is_accumulator(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kComplexFloat:
    case at::kComplexDouble:
      return true;
    default:
      return false;
  }
}

at::Tensor
residual_cpu(const at::Tensor& acc, const at::Tensor& value, bool subtract) {
  static const auto kernel = TORCH_SM3_CHOOSE_KERNEL(residual);
  const ResidualLayout layout = residual_layout(acc, value, subtract);
  at::parallel_for(0, layout.count, kGrain, [&](int64_t begin, int64_t end) {
    kernel(layout.residual, begin, end);
  });
  return layout.out;
}

at::Tensor add_cpu(const at::Tensor& acc, const at::Tensor& value) {
  check_residual("reversible_add", acc, value);
  return residual_cpu(acc, value, false);
}

at::Tensor sub_cpu(const at::Tensor& acc, const at::Tensor& value) {
  check_residual("reversible_sub", acc, value);
  return residual_cpu(acc, value, true);
}

at::Tensor add_meta(const at::Tensor& acc, const at::Tensor& value) {
  check_residual("reversible_add", acc, value);
  return at::empty_like(acc);
}

at::Tensor sub_meta(const at::Tensor& acc, const at::Tensor& value) {
  check_residual("reversible_sub", acc, value);
  return at::empty_like(acc);
}

struct ResidualFunction : torch::autograd::Function<ResidualFunction> {
  static at::Tensor forward(
      torch::autograd::AutogradContext* ctx,
      const at::Tensor& acc,
      const at::Tensor& value,
      bool subtract) {
    ctx->saved_data["subtract"] = subtract;
    ctx->saved_data["type"] = static_cast<int64_t>(value.scalar_type());
    ctx->set_materialize_grads(false);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return subtract ? reversible_sub(acc, value) : reversible_add(acc, value);
  }

  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext* ctx,
      const torch::autograd::tensor_list& grads) {
    const at::Tensor& grad = grads[0];
    at::Tensor value_grad;
    if (grad.defined() && ctx->needs_input_grad(1)) {
      const auto type =
          static_cast<at::ScalarType>(ctx->saved_data["type"].toInt());
      value_grad = ctx->saved_data["subtract"].toBool() ? grad.neg() : grad;
      if (grad.is_complex() && !at::isComplexType(type)) {
        value_grad = at::real(value_grad);
      }
      value_grad = value_grad.to(type);
    }
    return {grad, value_grad, at::Tensor()};
  }
};

at::Tensor add_autograd(const at::Tensor& acc, const at::Tensor& value) {
  return ResidualFunction::apply(acc, value, false);
}

at::Tensor sub_autograd(const at::Tensor& acc, const at::Tensor& value) {
  return ResidualFunction::apply(acc, value, true);
}

using Signature = at::Tensor(const at::Tensor&, const at::Tensor&);

} // namespace

void check_residual(
    const char* op,
    const at::Tensor& acc,
    const at::Tensor& value) {
  TORCH_CHECK_TYPE(
      is_accumulator(acc.scalar_type()),
      op,
      ": expected a floating or complex accumulator, but got ",
      acc.scalar_type(),
      " (argument 'acc')");
  TORCH_CHECK_TYPE(
      is_accumulator(value.scalar_type()) &&
          (acc.is_complex() || !value.is_complex()),
      op,
      ": expected a floating value for an accumulator of ",
      acc.scalar_type(),
      ", but got ",
      value.scalar_type(),
      " (argument 'value')");
  TORCH_CHECK_NOT_IMPLEMENTED(
      acc.layout() == at::kStrided && value.layout() == at::kStrided,
      op,
      ": expected dense tensors, but got layouts ",
      acc.layout(),
      " and ",
      value.layout(),
      " (argument 'value')");
  TORCH_CHECK_VALUE(
      acc.sym_sizes() == value.sym_sizes(),
      op,
      ": expected the shape ",
      acc.sym_sizes(),
      " of the accumulator, but got ",
      value.sym_sizes(),
      " (argument 'value')");
  TORCH_CHECK_VALUE(
      acc.device() == value.device(),
      op,
      ": expected the accumulator's device ",
      acc.device(),
      ", but got ",
      value.device(),
      " (argument 'value')");
}

ResidualLayout
residual_layout(const at::Tensor& acc, const at::Tensor& value, bool subtract) {
  ResidualLayout layout;
  layout.out = at::empty_like(acc);
  const at::Tensor& out = layout.out;
  layout.acc = laid_out_as(out, acc, acc.scalar_type());
  // A real value for a complex accumulator becomes complex.
  layout.value = laid_out_as(
      out, value, acc.is_complex() ? acc.scalar_type() : value.scalar_type());
  const auto real = c10::toRealValueType(acc.scalar_type());
  layout.residual = {
      layout.acc.const_data_ptr(),
      layout.value.const_data_ptr(),
      out.mutable_data_ptr(),
      scalar_kind(real),
      scalar_kind(c10::toRealValueType(layout.value.scalar_type())),
      subtract};
  layout.count = out.numel() * (acc.is_complex() ? 2 : 1);
  return layout;
}

at::Tensor reversible_add(const at::Tensor& acc, const at::Tensor& value) {
  static const auto op = find_operator<Signature>("torch_sm3::reversible_add");
  return op.call(acc, value);
}

at::Tensor reversible_sub(const at::Tensor& acc, const at::Tensor& value) {
  static const auto op = find_operator<Signature>("torch_sm3::reversible_sub");
  return op.call(acc, value);
}

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.def("reversible_add(Tensor acc, Tensor value) -> Tensor");
  m.def("reversible_sub(Tensor acc, Tensor value) -> Tensor");
}

TORCH_LIBRARY_IMPL(torch_sm3, CPU, m) {
  m.impl("reversible_add", &add_cpu);
  m.impl("reversible_sub", &sub_cpu);
}

TORCH_LIBRARY_IMPL(torch_sm3, Meta, m) {
  m.impl("reversible_add", &add_meta);
  m.impl("reversible_sub", &sub_meta);
}

TORCH_LIBRARY_IMPL(torch_sm3, Autograd, m) {
  m.impl("reversible_add", &add_autograd);
  m.impl("reversible_sub", &sub_autograd);
}

} // namespace torch_sm3::reversible
