// SPDX-License-Identifier: Apache-2.0
#include "adasum_compute.h"
#include "adasum_ops.h"
#include "scalar_kind.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/DeviceGuard.h>

#include <vector>

namespace torch_sm3::distributed {
namespace {

// Dots and sums see complex numbers as pairs of reals.
at::Tensor reals_of(const at::Tensor& dense) {
  return dense.is_complex() ? at::view_as_real(dense).flatten(-2) : dense;
}

Layout layout_of(at::IntArrayRef sizes, bool complex) {
  std::vector<int64_t> reals = sizes.vec();
  for (int64_t& size : reals) {
    size *= complex ? 2 : 1;
  }
  return Layout(std::move(reals));
}

Range tiles_of(const Layout& layout) {
  return {0, static_cast<int64_t>(layout.tiles().size())};
}

Rows rows_of(const at::Tensor& stack) {
  Rows rows;
  rows.data = reals_of(stack.contiguous()).unbind(0);
  return rows;
}

// False if a look at the flags shows that there is nothing to repeat. On a
// device they are looked at by the kernels, and nothing waits.
bool may_need_repeat(const at::Tensor& flags) {
  return !flags.is_cpu() || flags.any().item<bool>();
}

// The inner products of whole layers; what float32 sums cannot resolve is
// summed in float64.
at::Tensor
gram_of(const Layout& layout, const Rows& rows, Accumulate accumulate) {
  const Range tiles = tiles_of(layout);
  const Range layers{0, layout.layers()};
  const at::Tensor partial = dots_of_tiles(layout, tiles, rows, accumulate);
  at::Tensor gram = add_tiles(layout, layers, partial);
  if (accumulate == Accumulate::kFloat32) {
    const at::Tensor flags = need_second_pass(gram, accumulate);
    if (may_need_repeat(flags)) {
      repeat_dots_of_tiles(layout, tiles, rows, flags, partial);
      gram = add_tiles(layout, layers, partial);
    }
  }
  return gram;
}

// Combines whole layers. Where the squares of float64 leaves overflow or
// vanish, each leaf is scaled by its own power of two.
void reduce(
    const Layout& layout,
    Rows rows,
    const Rule& rule,
    const at::Tensor& out) {
  const Range tiles = tiles_of(layout);
  const Range layers{0, layout.layers()};
  const at::Tensor partial =
      dots_of_tiles(layout, tiles, rows, Accumulate::kFloat64);
  at::Tensor gram = add_tiles(layout, layers, partial);
  at::Tensor shifts;
  if (rows.data[0].scalar_type() == at::kDouble) {
    const at::Tensor flags = need_second_pass(gram, Accumulate::kFloat64);
    if (may_need_repeat(flags)) {
      shifts = shifts_of_layers(
          layout, layers, exponents_of_tiles(layout, tiles, rows, flags));
      rows.scales = scales_of_tiles(layout, tiles, rows, shifts);
      repeat_dots_of_tiles(layout, tiles, rows, flags, partial);
      gram = add_tiles(layout, layers, partial);
    }
  }
  const Coefficients c = coefficients_of_layers(gram, rule, {}, shifts);
  combine_tiles(layout, tiles, rows, c.values, out);
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

} // namespace

at::Tensor pair_of(
    const at::Tensor& a,
    const at::Tensor& b,
    at::IntArrayRef sizes,
    double weight_a,
    double weight_b) {
  check_pair(a, b, weight_a, weight_b);
  check_same_shape(a, b);
  check_sizes(sizes, a.numel(), "adasum_pair");
  const c10::DeviceGuard guard(a.device());
  at::Tensor out = at::empty(a.sizes(), a.options());
  Rule rule;
  rule.weights = {weight_a, weight_b};
  reduce(
      layout_of(sizes, a.is_complex()),
      {{reals_of(a.contiguous().view({-1})),
        reals_of(b.contiguous().view({-1}))},
       {}},
      rule,
      reals_of(out.view({-1})));
  return out;
}

at::Tensor gram_of_stack(
    const at::Tensor& stack,
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> accumulate_dtype) {
  check_stack(stack, "adasum_gram");
  check_sizes(sizes, stack.size(1), "adasum_gram");
  const Accumulate accumulate =
      parse_accumulate(accumulate_dtype, "adasum_gram");
  const c10::DeviceGuard guard(stack.device());
  return gram_of(
      layout_of(sizes, stack.is_complex()), rows_of(stack), accumulate);
}

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

at::Tensor combine_stack(
    const at::Tensor& stack,
    const at::Tensor& coefficients,
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype) {
  check_combine(stack, coefficients, sizes);
  const c10::DeviceGuard guard(stack.device());
  const Layout layout = layout_of(sizes, stack.is_complex());
  at::Tensor out = at::empty(
      {stack.size(1)}, stack.options().dtype(result_dtype(stack, dtype)));
  combine_tiles(
      layout,
      tiles_of(layout),
      rows_of(stack),
      coefficients.contiguous(),
      reals_of(out));
  return out;
}

} // namespace torch_sm3::distributed
