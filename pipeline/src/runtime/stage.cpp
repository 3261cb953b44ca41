// SPDX-License-Identifier: Apache-2.0
// Stages of functions, scripted modules and torch::nn modules.
#include <torch_sm3/check.h>
#include <torch_sm3/pipeline/stage.h>

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/container/any.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace torch_sm3::pipeline {
namespace {

constexpr size_t kMostArguments = 8;

int64_t check_index(int64_t index) {
  TORCH_SM3_CHECK_VALUE(
      index >= 0, "Stage", "index", "an index of at least 0", index);
  return index;
}

// Arguments by name behind those by position.
std::vector<c10::IValue>
in_a_row(std::vector<c10::IValue> arguments, const Stage::Keywords& keywords) {
  for (const auto& keyword : keywords) {
    arguments.push_back(keyword.second);
  }
  return arguments;
}

torch::nn::AnyValue any_value(const c10::IValue& value) {
  if (value.isTensor()) {
    return torch::nn::AnyValue(value.toTensor());
  }
  if (value.isInt()) {
    return torch::nn::AnyValue(value.toInt());
  }
  if (value.isDouble()) {
    return torch::nn::AnyValue(value.toDouble());
  }
  if (value.isBool()) {
    return torch::nn::AnyValue(value.toBool());
  }
  TORCH_CHECK_TYPE(
      false,
      "Stage: expected tensors, int, float or bool for a torch::nn module, but "
      "got ",
      value.tagKind());
}

template <size_t... I>
torch::nn::AnyValue call_with(
    torch::nn::AnyModule& module,
    std::vector<torch::nn::AnyValue>& values,
    std::index_sequence<I...>) {
  return module.any_forward(std::move(values[I])...);
}

template <size_t... N>
torch::nn::AnyValue call_any(
    torch::nn::AnyModule& module,
    std::vector<torch::nn::AnyValue>& values,
    std::index_sequence<N...>) {
  std::vector<torch::nn::AnyValue> result;
  const auto attempt = [&]<size_t n>(std::integral_constant<size_t, n>) {
    if (values.size() == n) {
      result.push_back(
          call_with(module, values, std::make_index_sequence<n>()));
    }
  };
  (attempt(std::integral_constant<size_t, N>()), ...);
  TORCH_CHECK_TYPE(
      !result.empty(),
      "Stage: expected at most ",
      kMostArguments,
      " arguments for a torch::nn module, but got ",
      values.size());
  return std::move(result.front());
}

template <class... T>
bool convert(torch::nn::AnyValue& value, c10::IValue* result) {
  return ([&] {
    if (T* found = value.try_get<T>()) {
      *result = std::move(*found);
      return true;
    }
    return false;
  }() || ...);
}

c10::IValue run_any(
    torch::nn::AnyModule& module,
    const std::vector<c10::IValue>& arguments) {
  using at::Tensor;
  std::vector<torch::nn::AnyValue> values;
  values.reserve(arguments.size());
  for (const c10::IValue& argument : arguments) {
    values.push_back(any_value(argument));
  }
  torch::nn::AnyValue output =
      call_any(module, values, std::make_index_sequence<kMostArguments + 1>());
  c10::IValue result;
  const bool known = convert<
      Tensor,
      std::vector<Tensor>,
      std::tuple<Tensor, Tensor>,
      std::tuple<Tensor, Tensor, Tensor>>(output, &result);
  TORCH_CHECK_TYPE(
      known,
      "Stage: expected a torch::nn module to return a tensor, or a pair, "
      "triple "
      "or vector of tensors, but got ",
      output.type_info().name());
  return result;
}

} // namespace

Stage::Stage(int64_t index, Body body, std::vector<at::Tensor> parameters)
    : index_(check_index(index)),
      call_([body = std::move(body)](
                std::vector<c10::IValue> arguments,
                const Keywords& keywords) {
        return body(in_a_row(std::move(arguments), keywords));
      }),
      parameters_(std::move(parameters)) {}

Stage::Stage(int64_t index, const torch::jit::Module& module)
    : index_(check_index(index)),
      call_([module = module](
                std::vector<c10::IValue> arguments,
                const Keywords& keywords) mutable {
        return module.forward(
            std::move(arguments), {keywords.begin(), keywords.end()});
      }) {
  for (const at::Tensor& parameter : module.parameters()) {
    parameters_.push_back(parameter);
  }
}

Stage::Stage(int64_t index, const torch::nn::AnyModule& module)
    : index_(check_index(index)),
      // Copies of an AnyModule share the module.
      call_([module = module](
                std::vector<c10::IValue> arguments,
                const Keywords& keywords) mutable {
        return run_any(module, in_a_row(std::move(arguments), keywords));
      }),
      parameters_(module.ptr()->parameters()) {}

Stage& Stage::route(std::string name, int64_t target) {
  TORCH_SM3_CHECK_VALUE(
      target > index_,
      "Stage",
      "target",
      c10::str("a stage after ", index_),
      target);
  routes_[std::move(name)] = target;
  return *this;
}

Stage& Stage::split(Split split) {
  split_ = split;
  return *this;
}

Stage& Stage::tie(std::string name, const at::Tensor& weight) {
  const bool known = std::any_of(
      parameters_.begin(), parameters_.end(), [&](const at::Tensor& own) {
        return own.is_same(weight);
      });
  TORCH_SM3_CHECK_VALUE(
      known,
      "Stage",
      "weight",
      "one of the stage's parameters",
      "another tensor");
  ties_.emplace_back(std::move(name), weight);
  return *this;
}

Stage& Stage::reduce(bool reduce) {
  reduce_ = reduce;
  return *this;
}

Stage& Stage::overlap(Overlap overlap) {
  overlap_ = std::move(overlap);
  return *this;
}

c10::IValue Stage::operator()(
    std::vector<c10::IValue> arguments,
    const Keywords& keywords,
    const std::function<void()>& backward) const {
  return overlap_(in_a_row(std::move(arguments), keywords), backward);
}

} // namespace torch_sm3::pipeline
