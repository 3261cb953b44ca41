// SPDX-License-Identifier: Apache-2.0
#include <sm3_update.h>
#include <torch_sm3/check.h>
#include <torch_sm3/sm3.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>

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

namespace {

at::ScalarType accumulator_dtype(const at::Tensor& param) {
  return param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

bool supported_dtype(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf ||
         type == at::kBFloat16;
}

void check_hyperparameters(const SM3Hyperparameters& h) {
  const auto finite = [](double x) { return std::isfinite(x) && x >= 0; };
  TORCH_SM3_CHECK_VALUE(
      finite(h.lr), "sm3_update_", "lr", "a finite number >= 0", h.lr);
  TORCH_SM3_CHECK_VALUE(
      h.momentum >= 0 && h.momentum < 1,
      "sm3_update_",
      "momentum",
      "0 <= momentum < 1",
      h.momentum);
  TORCH_SM3_CHECK_VALUE(
      h.beta2 > 0 && h.beta2 <= 1,
      "sm3_update_",
      "beta2",
      "0 < beta2 <= 1 (1 is the sum)",
      h.beta2);
  TORCH_SM3_CHECK_VALUE(
      finite(h.eps), "sm3_update_", "eps", "a finite number >= 0", h.eps);
  TORCH_SM3_CHECK_VALUE(
      finite(h.weight_decay),
      "sm3_update_",
      "weight_decay",
      "a finite number >= 0",
      h.weight_decay);
}

void check_param(const at::Tensor& param, size_t i) {
  TORCH_SM3_CHECK_VALUE(
      param.layout() == at::kStrided,
      "sm3_update_",
      "params",
      "dense parameters",
      c10::str("layout ", param.layout(), " at index ", i));
  TORCH_SM3_CHECK_VALUE(
      supported_dtype(param.scalar_type()),
      "sm3_update_",
      "params",
      "float64, float32, float16 or bfloat16",
      c10::str(param.scalar_type(), " at index ", i));
  if (!param.is_meta()) {
    TORCH_CHECK(
        at::has_internal_overlap(param) != at::MemOverlap::Yes,
        "sm3_update_: expected parameters whose elements do not share memory, ",
        "but got strides ",
        param.strides(),
        " at index ",
        i,
        " (argument 'params')");
  }
}

void check_grad(const at::Tensor& grad, const at::Tensor& param, size_t i) {
  TORCH_CHECK(
      grad.layout() == at::kStrided,
      "sm3_update_: expected dense gradients, but got layout ",
      grad.layout(),
      " at index ",
      i,
      " (argument 'grads')");
  TORCH_SM3_CHECK_VALUE(
      grad.sym_sizes() == param.sym_sizes(),
      "sm3_update_",
      "grads",
      c10::str("shape ", param.sym_sizes(), " at index ", i),
      grad.sym_sizes());
  const bool fits =
      supported_dtype(grad.scalar_type()) &&
      (grad.scalar_type() != at::kDouble || param.scalar_type() == at::kDouble);
  TORCH_SM3_CHECK_VALUE(
      fits,
      "sm3_update_",
      "grads",
      c10::str("a dtype for a ", param.scalar_type(), " parameter"),
      c10::str(grad.scalar_type(), " at index ", i));
  TORCH_SM3_CHECK_VALUE(
      grad.device() == param.device(),
      "sm3_update_",
      "grads",
      c10::str("device ", param.device(), " at index ", i),
      grad.device());
}

void check_accumulator(
    const at::Tensor& accumulator,
    const std::vector<c10::SymInt>& shape,
    const at::Tensor& param,
    size_t i) {
  TORCH_SM3_CHECK_VALUE(
      accumulator.sym_sizes() == c10::SymIntArrayRef(shape),
      "sm3_update_",
      "accumulators",
      c10::str("shape ", c10::SymIntArrayRef(shape), " for parameter ", i),
      accumulator.sym_sizes());
  TORCH_SM3_CHECK_VALUE(
      accumulator.scalar_type() == accumulator_dtype(param) &&
          accumulator.device() == param.device() && accumulator.is_contiguous(),
      "sm3_update_",
      "accumulators",
      c10::str(
          "a contiguous ",
          accumulator_dtype(param),
          " tensor on ",
          param.device(),
          " for parameter ",
          i),
      c10::str(accumulator.scalar_type(), " on ", accumulator.device()));
}

void check_momentum(
    const at::Tensor& buffer,
    const at::Tensor& param,
    size_t i) {
  TORCH_SM3_CHECK_VALUE(
      buffer.sym_sizes() == param.sym_sizes() &&
          buffer.scalar_type() == param.scalar_type() &&
          buffer.device() == param.device() && buffer.layout() == at::kStrided,
      "sm3_update_",
      "momentum_buffers",
      c10::str(
          param.scalar_type(),
          " of shape ",
          param.sym_sizes(),
          " on ",
          param.device(),
          " for parameter ",
          i),
      c10::str(
          buffer.scalar_type(),
          " of shape ",
          buffer.sym_sizes(),
          " on ",
          buffer.device()));
}

void check_step(const at::Tensor& step, size_t i) {
  TORCH_SM3_CHECK_VALUE(
      step.scalar_type() == at::kLong && step.sym_numel() == 1 &&
          (step.is_cpu() || step.is_meta()),
      "sm3_update_",
      "steps",
      c10::str("an int64 scalar on the CPU for parameter ", i),
      c10::str(
          step.scalar_type(),
          " of shape ",
          step.sym_sizes(),
          " on ",
          step.device()));
}

void check_counts(const SM3Arguments& a) {
  const size_t count = a.params.size();
  TORCH_SM3_CHECK_VALUE(
      a.grads.size() == count,
      "sm3_update_",
      "grads",
      c10::str(count, " tensors"),
      a.grads.size());
  TORCH_SM3_CHECK_VALUE(
      a.steps.size() == count,
      "sm3_update_",
      "steps",
      c10::str(count, " tensors"),
      a.steps.size());
  const size_t buffers = a.hyperparameters.momentum > 0 ? count : 0;
  TORCH_SM3_CHECK_VALUE(
      a.momentum_buffers.size() == buffers,
      "sm3_update_",
      "momentum_buffers",
      c10::str(buffers, " tensors with momentum ", a.hyperparameters.momentum),
      a.momentum_buffers.size());
}

} // namespace

std::vector<SM3Item> check_sm3_update(const SM3Arguments& a) {
  check_hyperparameters(a.hyperparameters);
  check_counts(a);
  std::vector<SM3Item> items;
  items.reserve(a.params.size());
  size_t next = 0;
  for (size_t i = 0; i < a.params.size(); ++i) {
    const at::Tensor& param = a.params[i];
    check_param(param, i);
    TORCH_SM3_CHECK_VALUE(
        param.device() == a.params[0].device(),
        "sm3_update_",
        "params",
        c10::str("every parameter on ", a.params[0].device()),
        c10::str(param.device(), " at index ", i));
    check_grad(a.grads[i], param, i);
    SM3Cover cover = sm3_cover(param.sym_sizes());
    TORCH_SM3_CHECK_VALUE(
        next + cover.count() <= a.accumulators.size(),
        "sm3_update_",
        "accumulators",
        c10::str(cover.count(), " tensors for parameter ", i),
        c10::str(a.accumulators.size() - next, " left in the list"));
    for (size_t k = 0; k < cover.count(); ++k) {
      check_accumulator(a.accumulators[next + k], cover.shape(k), param, i);
    }
    if (!a.momentum_buffers.empty()) {
      check_momentum(a.momentum_buffers[i], param, i);
    }
    check_step(a.steps[i], i);
    const size_t first = next;
    next += cover.count();
    items.push_back({i, first, std::move(cover)});
  }
  TORCH_SM3_CHECK_VALUE(
      next == a.accumulators.size(),
      "sm3_update_",
      "accumulators",
      c10::str(next, " tensors"),
      a.accumulators.size());
  return items;
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
  check_param(param, 0);
  const SM3Cover cover = sm3_cover(param.sym_sizes());
  std::vector<at::Tensor> accumulators;
  for (size_t k = 0; k < cover.count(); ++k) {
    accumulators.push_back(
        at::zeros_symint(
            cover.shape(k), param.options().dtype(accumulator_dtype(param))));
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
