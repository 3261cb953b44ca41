// SPDX-License-Identifier: Apache-2.0
#include <sm3_update.h>
#include <torch_sm3/check.h>

#include <ATen/MemoryOverlap.h>

#include <cmath>

namespace torch_sm3 {
namespace {

bool supported_dtype(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf ||
         type == at::kBFloat16;
}

} // namespace

at::ScalarType sm3_accumulator_dtype(const at::Tensor& param) {
  return param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_sm3_param(const at::Tensor& param, size_t i) {
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

namespace {

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
      accumulator.scalar_type() == sm3_accumulator_dtype(param) &&
          accumulator.device() == param.device() && accumulator.is_contiguous(),
      "sm3_update_",
      "accumulators",
      c10::str(
          "a contiguous ",
          sm3_accumulator_dtype(param),
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
    check_sm3_param(param, i);
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

} // namespace torch_sm3
