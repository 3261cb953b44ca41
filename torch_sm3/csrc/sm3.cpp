// SPDX-License-Identifier: Apache-2.0
#include <sm3_update.h>
#include <torch_sm3/sm3.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

namespace torch_sm3 {

std::vector<c10::SymInt> SM3Cover::shape(size_t index) const {
  if (!diagonal) {
    return {view[index]};
  }
  return view.empty() ? std::vector<c10::SymInt>{1} : view;
}

size_t SM3Cover::count() const {
  return diagonal ? 1 : view.size();
}

SM3Cover sm3_cover(c10::SymIntArrayRef sizes) {
  SM3Cover cover;
  c10::SymInt sum = 0;
  c10::SymInt product = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    // The number of a size-1 dimension is never the least one.
    if (sizes[d] != 1) {
      cover.dims.push_back(static_cast<int64_t>(d));
      cover.view.push_back(sizes[d]);
      sum = sum + sizes[d];
      product = product * sizes[d];
    }
  }
  cover.diagonal = cover.view.size() < 2 || sum >= product;
  return cover;
}

void bump_sm3_versions(const SM3Arguments& a) {
  for (const at::TensorList& list :
       {a.params, a.accumulators, a.momentum_buffers, a.steps}) {
    for (const at::Tensor& tensor : list) {
      if (!tensor.is_inference()) {
        tensor.unsafeGetTensorImpl()->bump_version();
      }
    }
  }
}

SM3Hyperparameters sm3_hyperparameters(
    double lr,
    double momentum,
    double beta2,
    std::optional<double> eps,
    double weight_decay,
    bool maximize) {
  // 1e-30: small enough that a zero gradient is an exact no-op.
  return {lr, momentum, beta2, eps.value_or(1e-30), weight_decay, maximize};
}

namespace {

ScalarKind kind_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return ScalarKind::kFloat64;
    case at::kHalf:
      return ScalarKind::kFloat16;
    case at::kBFloat16:
      return ScalarKind::kBFloat16;
    default:
      return ScalarKind::kFloat32;
  }
}

std::vector<int64_t>
strides_of(const at::Tensor& tensor, const std::vector<int64_t>& dims) {
  std::vector<int64_t> strides;
  strides.reserve(dims.size());
  for (const int64_t d : dims) {
    strides.push_back(tensor.stride(d));
  }
  if (strides.empty()) {
    strides.push_back(1);
  }
  return strides;
}

} // namespace

SM3Layout sm3_layout(const SM3Arguments& a, const SM3Item& item) {
  const at::Tensor& param = a.params[item.index];
  const at::Tensor& grad = a.grads[item.index];
  SM3Layout layout;
  for (const int64_t d : item.cover.dims) {
    layout.sizes.push_back(param.size(d));
  }
  if (layout.sizes.empty()) {
    layout.sizes.push_back(1);
  }
  layout.param_strides = strides_of(param, item.cover.dims);
  layout.grad_strides = strides_of(grad, item.cover.dims);
  layout.param = param.mutable_data_ptr();
  layout.grad = grad.const_data_ptr();
  layout.param_kind = kind_of(param);
  layout.grad_kind = kind_of(grad);
  layout.momentum = nullptr;
  layout.momentum_strides = layout.param_strides;
  if (!a.momentum_buffers.empty()) {
    const at::Tensor& buffer = a.momentum_buffers[item.index];
    layout.momentum = buffer.mutable_data_ptr();
    layout.momentum_strides = strides_of(buffer, item.cover.dims);
  }
  layout.diagonal = item.cover.diagonal;
  return layout;
}

std::vector<at::Tensor> sm3_accumulators(const at::Tensor& param) {
  check_sm3_param(param, 0);
  const SM3Cover cover = sm3_cover(param.sym_sizes());
  std::vector<at::Tensor> accumulators;
  for (size_t k = 0; k < cover.count(); ++k) {
    accumulators.push_back(
        at::zeros_symint(
            cover.shape(k),
            param.options().dtype(sm3_accumulator_dtype(param))));
  }
  return accumulators;
}

void sm3_update_(
    at::TensorList params,
    at::TensorList grads,
    at::TensorList accumulators,
    at::TensorList momentum_buffers,
    at::TensorList steps,
    double lr,
    double momentum,
    double beta2,
    std::optional<double> eps,
    double weight_decay,
    bool maximize) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_sm3::sm3_update_", "")
                             .typed<void(
                                 at::TensorList,
                                 at::TensorList,
                                 at::TensorList,
                                 at::TensorList,
                                 at::TensorList,
                                 double,
                                 double,
                                 double,
                                 std::optional<double>,
                                 double,
                                 bool)>();
  op.call(
      params,
      grads,
      accumulators,
      momentum_buffers,
      steps,
      lr,
      momentum,
      beta2,
      eps,
      weight_decay,
      maximize);
}

namespace {

void sm3_update_meta(
    at::TensorList params,
    at::TensorList grads,
    at::TensorList accumulators,
    at::TensorList momentum_buffers,
    at::TensorList steps,
    double lr,
    double momentum,
    double beta2,
    std::optional<double> eps,
    double weight_decay,
    bool maximize) {
  check_sm3_update(
      {params,
       grads,
       accumulators,
       momentum_buffers,
       steps,
       sm3_hyperparameters(lr, momentum, beta2, eps, weight_decay, maximize)});
}

} // namespace

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.def("sm3_accumulators(Tensor param) -> Tensor[]");
  // "-> *" on the first list: the alias analysis of TorchScript follows a write
  // into a list but not on into its tensors, and would remove the call as dead.
  m.def(
      "sm3_update_(Tensor(a! -> *)[] params, Tensor[] grads, "
      "Tensor(b!)[] accumulators, Tensor(c!)[] momentum_buffers, "
      "Tensor(f!)[] steps, *, float lr, float momentum=0., float beta2=1., "
      "float? eps=None, float weight_decay=0., bool maximize=False) -> ()");
}

TORCH_LIBRARY_IMPL(torch_sm3, CompositeExplicitAutograd, m) {
  m.impl("sm3_accumulators", &sm3_accumulators);
}

TORCH_LIBRARY_IMPL(torch_sm3, Meta, m) {
  m.impl("sm3_update_", &sm3_update_meta);
}

} // namespace torch_sm3
