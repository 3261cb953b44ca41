// SPDX-License-Identifier: Apache-2.0

/// \file
/// The Adasum operators for CUDA tensors.

#include "adasum_compute.h"
#include "adasum_ops.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace torch_sm3::distributed {
namespace {

Rows rows_of(const at::Tensor& stack) {
  Rows rows;
  const at::Tensor dense = stack.contiguous();
  for (int64_t i = 0; i < dense.size(0); ++i) {
    rows.data.push_back(dense.select(0, i));
  }
  return rows;
}

at::Tensor gram_of(const Layout& layout, const Rows& rows) {
  const at::Tensor partial = dots_of_tiles(
      layout,
      {0, static_cast<int64_t>(layout.tiles().size())},
      rows,
      Accumulate::kFloat64);
  return add_tiles(layout, {0, layout.layers()}, partial);
}

at::Tensor stack_gram_cuda(
    const at::Tensor& stack,
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> /*accumulate_dtype*/) {
  check_stack(stack, "adasum_gram");
  check_sizes(sizes, stack.size(1), "adasum_gram");
  const c10::cuda::CUDAGuard guard(stack.device());
  return gram_of(Layout(sizes.vec()), rows_of(stack));
}

at::Tensor stack_combine_cuda(
    const at::Tensor& stack,
    const at::Tensor& coefficients,
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> /*dtype*/) {
  check_combine(stack, coefficients, sizes);
  const c10::cuda::CUDAGuard guard(stack.device());
  const Layout layout(sizes.vec());
  at::Tensor out = at::empty({stack.size(1)}, stack.options());
  combine_tiles(
      layout,
      {0, static_cast<int64_t>(layout.tiles().size())},
      rows_of(stack),
      coefficients.contiguous(),
      out);
  return out;
}

at::Tensor pair_cuda(
    const at::Tensor& a,
    const at::Tensor& b,
    at::IntArrayRef sizes,
    double weight_a,
    double weight_b) {
  check_pair(a, b, weight_a, weight_b);
  check_same_shape(a, b);
  check_sizes(sizes, a.numel(), "adasum_pair");
  const c10::cuda::CUDAGuard guard(a.device());
  const Layout layout(sizes.vec());
  const at::Tensor x = a.contiguous();
  at::Tensor out = at::empty_like(x);
  const Rows rows{{x.view({-1}), b.contiguous().view({-1})}, {}};
  Rule rule;
  rule.weights = {weight_a, weight_b};
  const at::Tensor gram = gram_of(layout, rows);
  combine_tiles(
      layout,
      {0, static_cast<int64_t>(layout.tiles().size())},
      rows,
      coefficients_of_layers(gram, rule, {}, {}).values,
      out.view({-1}));
  return out;
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, CUDA, m) {
  m.impl("adasum_pair", &pair_cuda);
  m.impl("adasum_gram", &stack_gram_cuda);
  m.impl("adasum_coefficients", &coefficients_of_gram);
  m.impl("adasum_combine", &stack_combine_cuda);
}

} // namespace torch_sm3::distributed
