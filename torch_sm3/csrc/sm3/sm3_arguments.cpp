// SPDX-License-Identifier: Apache-2.0
#include <sm3_arguments.h>

#include <string_view>

namespace torch_sm3 {
namespace {

std::optional<at::Tensor> optional_tensor(const c10::IValue& value) {
  return value.isNone() ? std::nullopt : std::optional(value.toTensor());
}

// Where a list of tensors goes, or null.
std::vector<at::Tensor>* list_of(SM3Arguments& a, std::string_view name) {
  return name == "params"             ? &a.params
         : name == "grads"            ? &a.grads
         : name == "accumulators"     ? &a.accumulators
         : name == "momentum_buffers" ? &a.momentum_buffers
         : name == "momentum_scales"  ? &a.momentum_scales
         : name == "compensations"    ? &a.compensations
         : name == "steps"            ? &a.steps
                                      : nullptr;
}

// Where a number goes, or null.
double* number_of(SM3Arguments& a, std::string_view name) {
  return name == "momentum"       ? &a.h.momentum
         : name == "beta2"        ? &a.h.beta2
         : name == "weight_decay" ? &a.h.weight_decay
                                  : nullptr;
}

void take(SM3Arguments& a, std::string_view name, c10::IValue value) {
  if (auto* list = list_of(a, name)) {
    *list = value.toTensorVector();
  } else if (auto* number = number_of(a, name)) {
    *number = value.toDouble();
  } else if (name == "lr" && value.isTensor()) {
    a.lr = value.toTensor();
  } else if (name == "lr") {
    a.h.lr = value.toDouble();
  } else if (name == "eps") {
    a.eps = value.toOptional<double>();
  } else if (name == "maximize") {
    a.h.maximize = value.toBool();
  } else if (name == "variant") {
    a.variant = value.toStringRef();
  } else if (name == "compat") {
    a.compat = value.toStringRef();
  } else if (name == "covers") {
    a.covers = value.toIntVector();
  } else if (name == "global_index") {
    a.global_index = value.toIntVector();
  } else if (name == "stochastic_rounding") {
    a.stochastic_rounding = value.toBool();
  } else if (name == "seed") {
    a.seed = value.toInt();
  } else if (name == "grad_scale") {
    a.grad_scale = optional_tensor(value);
  } else if (name == "found_inf") {
    a.found_inf = optional_tensor(value);
  } else if (name == "skipped") {
    a.skipped = optional_tensor(value);
  } else if (name == "param") {
    a.params = {value.toTensor()};
  } else if (name == "values") {
    a.grads = {value.toTensor()};
  } else if (name == "step") {
    a.steps = {value.toTensor()};
  } else if (name == "indices") {
    a.indices = value.toTensor();
    a.op = "sm3_sparse_update_";
  } else {
    TORCH_INTERNAL_ASSERT(false, "an argument without a place: ", name);
  }
}

} // namespace

SM3Arguments
take_sm3_arguments(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  SM3Arguments a;
  const auto& schema = op.schema().arguments();
  const size_t count = schema.size();
  for (size_t i = 0; i < count; ++i) {
    take(a, schema[i].name(), std::move(torch::jit::peek(*stack, i, count)));
  }
  torch::jit::drop(*stack, count);
  return a;
}

bool sm3_present(const std::vector<at::Tensor>& list, const SM3Item& item) {
  return !list.empty() && list[item.index].sym_numel() != 0;
}

void bump_sm3_versions(const SM3Arguments& a) {
  for (const auto* list :
       {&a.params,
        &a.accumulators,
        &a.momentum_buffers,
        &a.momentum_scales,
        &a.compensations,
        &a.steps}) {
    for (const at::Tensor& tensor : *list) {
      if (!tensor.is_inference()) {
        tensor.unsafeGetTensorImpl()->bump_version();
      }
    }
  }
}

} // namespace torch_sm3
