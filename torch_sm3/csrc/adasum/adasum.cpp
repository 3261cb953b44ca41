// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/distributed.h>

#include "adasum_compute.h"
#include "adasum_cpu.h"
#include "adasum_ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <optional>
#include <string_view>
#include <vector>

namespace torch_sm3::distributed {
namespace {

std::vector<const void*> row_pointers(const at::Tensor& stack) {
  const auto* base = static_cast<const char*>(stack.const_data_ptr());
  const int64_t bytes = stack.size(1) * stack.element_size();
  std::vector<const void*> rows;
  for (int64_t i = 0; i < stack.size(0); ++i) {
    rows.push_back(base + i * bytes);
  }
  return rows;
}

at::Tensor pair_cpu(
    const at::Tensor& a,
    const at::Tensor& b,
    at::IntArrayRef sizes,
    double weight_a,
    double weight_b) {
  check_pair(a, b, sizes, weight_a, weight_b);
  const Layout layout(sizes.vec());
  const Range tiles{0, static_cast<int64_t>(layout.tiles().size())};
  const at::Tensor x = a.contiguous();
  at::Tensor out = at::empty_like(x);
  const Rows rows{{x.view({-1}), b.contiguous().view({-1})}, {}};
  Rule rule;
  rule.weights = {weight_a, weight_b};
  const at::Tensor gram = add_tiles(
      layout,
      {0, layout.layers()},
      dots_of_tiles(layout, tiles, rows, Accumulate::kFloat64));
  const Coefficients c = coefficients_of_layers(gram, rule, {}, {});
  combine_tiles(layout, tiles, rows, c.values, out.view({-1}));
  return out;
}

at::Tensor stack_gram_cpu(const at::Tensor& stack, at::IntArrayRef sizes) {
  check_stack(stack, "adasum_gram");
  check_sizes(sizes, stack.size(1), "adasum_gram");
  const at::Tensor dense = stack.contiguous();
  const int64_t p = stack.size(0);
  at::Tensor gram = at::empty(
      {static_cast<int64_t>(sizes.size()), p, p},
      stack.options().dtype(at::kDouble));
  const std::vector<const void*> rows = row_pointers(dense);
  gram_cpu(
      {rows.data(),
       p,
       scalar_kind(stack.scalar_type(), "adasum_gram", "stack")},
      sizes,
      gram.mutable_data_ptr<double>());
  return gram;
}

at::Tensor stack_combine_cpu(
    const at::Tensor& stack,
    const at::Tensor& coefficients,
    at::IntArrayRef sizes) {
  check_combine(stack, coefficients, sizes);
  const at::Tensor dense = stack.contiguous();
  const at::Tensor c = coefficients.contiguous();
  at::Tensor out = at::empty({stack.size(1)}, stack.options());
  const std::vector<const void*> rows = row_pointers(dense);
  combine_cpu(
      {rows.data(),
       stack.size(0),
       scalar_kind(stack.scalar_type(), "adasum_combine", "stack")},
      c.const_data_ptr<double>(),
      cut_into_tiles(sizes),
      out.mutable_data_ptr());
  return out;
}

at::Tensor pair_meta(
    const at::Tensor& a,
    const at::Tensor& /*b*/,
    c10::SymIntArrayRef /*sizes*/,
    double /*weight_a*/,
    double /*weight_b*/) {
  return at::empty_symint(a.sym_sizes(), a.options());
}

at::Tensor gram_meta(const at::Tensor& stack, c10::SymIntArrayRef sizes) {
  check_stack(stack, "adasum_gram");
  const c10::SymInt p = stack.sym_size(0);
  return at::empty_symint(
      {c10::SymInt(static_cast<int64_t>(sizes.size())), p, p},
      stack.options().dtype(at::kDouble));
}

at::Tensor coefficients_meta(
    const at::Tensor& gram,
    std::string_view mode,
    const std::optional<at::Tensor>& /*weights*/,
    at::OptionalIntArrayRef nodes,
    std::string_view inner,
    double scale) {
  parse_rule(gram, mode, nodes, inner, scale);
  return at::empty_symint({gram.sym_size(0), gram.sym_size(1)}, gram.options());
}

at::Tensor combine_meta(
    const at::Tensor& stack,
    const at::Tensor& /*coefficients*/,
    c10::SymIntArrayRef /*sizes*/) {
  check_stack(stack, "adasum_combine");
  return at::empty_symint({stack.sym_size(1)}, stack.options());
}

// Weights are few and are checked, so they come to the host.
std::vector<double> weights_of(const at::Tensor& weights, int64_t p) {
  check_weights(weights, p);
  const at::Tensor values = weights.to(at::kCPU, at::kDouble).contiguous();
  const double* first = values.const_data_ptr<double>();
  std::vector<double> list(first, first + p);
  check_weights(list, "adasum_coefficients");
  return list;
}

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<Signature>();
}

} // namespace

at::Tensor coefficients_of_gram(
    const at::Tensor& gram,
    std::string_view mode,
    const std::optional<at::Tensor>& weights,
    at::OptionalIntArrayRef nodes,
    std::string_view inner,
    double scale) {
  Rule rule = parse_rule(gram, mode, nodes, inner, scale);
  if (weights.has_value()) {
    rule.weights = weights_of(*weights, gram.size(1));
  }
  return coefficients_of_layers(gram.contiguous(), rule, {}, {}).values;
}

at::Tensor adasum_pair(
    const at::Tensor& a,
    const at::Tensor& b,
    c10::SymIntArrayRef sizes,
    double weight_a,
    double weight_b) {
  static const auto op = find<decltype(adasum_pair)>("torch_sm3::adasum_pair");
  return op.call(a, b, sizes, weight_a, weight_b);
}

at::Tensor adasum_gram(const at::Tensor& stack, c10::SymIntArrayRef sizes) {
  static const auto op = find<decltype(adasum_gram)>("torch_sm3::adasum_gram");
  return op.call(stack, sizes);
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
    c10::SymIntArrayRef sizes) {
  static const auto op =
      find<decltype(adasum_combine)>("torch_sm3::adasum_combine");
  return op.call(stack, coefficients, sizes);
}

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.def(
      "adasum_pair(Tensor a, Tensor b, SymInt[] sizes, *, "
      "float weight_a=1., float weight_b=1.) -> Tensor");
  m.def("adasum_gram(Tensor stack, SymInt[] sizes) -> Tensor");
  m.def(
      "adasum_coefficients(Tensor gram, str mode=\"tree\", *, "
      "Tensor? weights=None, int[]? nodes=None, str inner=\"mean\", "
      "float scale=1.) -> Tensor");
  m.def(
      "adasum_combine(Tensor stack, Tensor coefficients, SymInt[] sizes) "
      "-> Tensor");
}

TORCH_LIBRARY_IMPL(torch_sm3, CPU, m) {
  m.impl("adasum_pair", &pair_cpu);
  m.impl("adasum_gram", &stack_gram_cpu);
  m.impl("adasum_coefficients", &coefficients_of_gram);
  m.impl("adasum_combine", &stack_combine_cpu);
}

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
