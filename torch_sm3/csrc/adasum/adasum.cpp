// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/distributed.h>

#include "adasum_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <optional>
#include <string_view>

namespace torch_sm3::distributed {
namespace {

// Checks the sizes as far as they are known while a program is traced.
void check_known_sizes(
    c10::SymIntArrayRef sizes,
    const c10::SymInt& numel,
    const char* op) {
  const auto known = c10::asIntArrayRefSlowOpt(sizes);
  const std::optional<int64_t> sum = numel.maybe_as_int();
  if (known.has_value() && sum.has_value()) {
    check_sizes(*known, *sum, op);
  }
}

at::Tensor pair_meta(
    const at::Tensor& a,
    const at::Tensor& b,
    c10::SymIntArrayRef sizes,
    double weight_a,
    double weight_b) {
  check_pair(a, b, weight_a, weight_b);
  if (!a.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
      !b.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    check_same_shape(a, b);
  }
  check_known_sizes(sizes, a.sym_numel(), "adasum_pair");
  return at::empty_symint(a.sym_sizes(), a.options());
}

at::Tensor gram_meta(
    const at::Tensor& stack,
    c10::SymIntArrayRef sizes,
    std::optional<at::ScalarType> accumulate_dtype) {
  check_stack(stack, "adasum_gram");
  check_known_sizes(sizes, stack.sym_size(1), "adasum_gram");
  parse_accumulate(accumulate_dtype, "adasum_gram");
  const c10::SymInt p = stack.sym_size(0);
  return at::empty_symint(
      {c10::SymInt(static_cast<int64_t>(sizes.size())), p, p},
      stack.options().dtype(at::kDouble));
}

at::Tensor coefficients_meta(
    const at::Tensor& gram,
    std::string_view mode,
    const std::optional<at::Tensor>& weights,
    at::OptionalIntArrayRef nodes,
    std::string_view inner,
    double scale) {
  parse_rule(gram, mode, nodes, inner, scale);
  if (weights.has_value()) {
    check_weights(*weights, gram.sym_size(1));
  }
  return at::empty_symint({gram.sym_size(0), gram.sym_size(1)}, gram.options());
}

at::Tensor combine_meta(
    const at::Tensor& stack,
    const at::Tensor& /*coefficients*/,
    c10::SymIntArrayRef sizes,
    std::optional<at::ScalarType> dtype) {
  check_stack(stack, "adasum_combine");
  check_known_sizes(sizes, stack.sym_size(1), "adasum_combine");
  return at::empty_symint(
      {stack.sym_size(1)}, stack.options().dtype(result_dtype(stack, dtype)));
}

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Signature>();
}

} // namespace

at::Tensor adasum_pair(
    const at::Tensor& a,
    const at::Tensor& b,
    c10::SymIntArrayRef sizes,
    double weight_a,
    double weight_b) {
  static const auto op = find<decltype(adasum_pair)>("torch_sm3::adasum_pair");
  return op.call(a, b, sizes, weight_a, weight_b);
}

at::Tensor adasum_gram(
    const at::Tensor& stack,
    c10::SymIntArrayRef sizes,
    std::optional<at::ScalarType> accumulate_dtype) {
  static const auto op = find<decltype(adasum_gram)>("torch_sm3::adasum_gram");
  return op.call(stack, sizes, accumulate_dtype);
}

at::Tensor adasum_coefficients(
    const at::Tensor& gram,
    std::string_view mode,
    const std::optional<at::Tensor>& weights,
    at::OptionalIntArrayRef nodes,
    std::string_view inner,
    double scale) {
  static const auto op =
      find<decltype(adasum_coefficients)>("torch_sm3::adasum_coefficients");
  return op.call(gram, mode, weights, nodes, inner, scale);
}

at::Tensor adasum_combine(
    const at::Tensor& stack,
    const at::Tensor& coefficients,
    c10::SymIntArrayRef sizes,
    std::optional<at::ScalarType> dtype) {
  static const auto op =
      find<decltype(adasum_combine)>("torch_sm3::adasum_combine");
  return op.call(stack, coefficients, sizes, dtype);
}

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.def(
      "adasum_pair(Tensor a, Tensor b, SymInt[] sizes, *, "
      "float weight_a=1., float weight_b=1.) -> Tensor");
  m.def(
      "adasum_gram(Tensor stack, SymInt[] sizes, *, "
      "ScalarType? accumulate_dtype=None) -> Tensor");
  m.def(
      "adasum_coefficients(Tensor gram, str mode=\"tree\", *, "
      "Tensor? weights=None, int[]? nodes=None, str inner=\"mean\", "
      "float scale=1.) -> Tensor");
  m.def(
      "adasum_combine(Tensor stack, Tensor coefficients, SymInt[] sizes, *, "
      "ScalarType? dtype=None) -> Tensor");
}

namespace {

// The arithmetic below the operators asks the tensors for their device.
void register_kernels(torch::Library& m) {
  m.impl("adasum_pair", &pair_of);
  m.impl("adasum_gram", &gram_of_stack);
  m.impl("adasum_coefficients", &coefficients_of_gram);
  m.impl("adasum_combine", &combine_stack);
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, CPU, m) {
  register_kernels(m);
}

#ifdef TORCH_SM3_WITH_CUDA
TORCH_LIBRARY_IMPL(torch_sm3, CUDA, m) {
  register_kernels(m);
}
#endif

TORCH_LIBRARY_IMPL(torch_sm3, Meta, m) {
  m.impl("adasum_pair", &pair_meta);
  m.impl("adasum_gram", &gram_meta);
  m.impl("adasum_coefficients", &coefficients_meta);
  m.impl("adasum_combine", &combine_meta);
}

// Adasum is not a function to differentiate: backward says so.
TORCH_LIBRARY_IMPL(torch_sm3, Autograd, m) {
  for (const char* name :
       {"adasum_pair",
        "adasum_gram",
        "adasum_coefficients",
        "adasum_combine"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}

} // namespace torch_sm3::distributed
