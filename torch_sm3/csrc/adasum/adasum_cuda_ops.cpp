// SPDX-License-Identifier: Apache-2.0

/// \file
/// The Adasum operators for CUDA tensors.

#include "adasum_compute.h"
#include "adasum_cpu.h"
#include "adasum_cuda.h"
#include "adasum_ops.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <vector>

namespace torch_sm3::distributed {
namespace {

// Tiles of the layers, copied to the device of `like`.
struct Tiles {
  at::Tensor table;
  cuda::Shape shape;
};

Tiles upload_tiles(const at::Tensor& stack, at::IntArrayRef sizes) {
  const std::vector<Tile> tiles = cut_into_tiles(sizes);
  std::vector<int64_t> table(3 * tiles.size());
  std::vector<int64_t> first(sizes.size() + 1);
  for (size_t t = 0; t < tiles.size(); ++t) {
    table[t] = tiles[t].start;
    table[tiles.size() + t] = tiles[t].size;
    table[2 * tiles.size() + t] = tiles[t].layer;
    first[tiles[t].layer + 1] = static_cast<int64_t>(t) + 1;
  }
  // An empty layer begins and ends where the one before it ended.
  for (size_t layer = 0; layer < sizes.size(); ++layer) {
    first[layer + 1] = std::max(first[layer], first[layer + 1]);
  }
  table.insert(table.end(), first.begin(), first.end());
  Tiles result;
  result.table = at::tensor(table, at::kLong).to(stack.device());
  result.shape = {
      stack.size(0),
      stack.size(1),
      static_cast<int64_t>(sizes.size()),
      static_cast<int64_t>(tiles.size()),
      result.table.const_data_ptr<int64_t>()};
  return result;
}

at::Tensor gram_of(const at::Tensor& stack, const Tiles& tiles) {
  const int64_t p = stack.size(0);
  const auto options = stack.options().dtype(at::kDouble);
  at::Tensor partial = at::empty({tiles.shape.tiles, pair_count(p)}, options);
  at::Tensor gram = at::empty({tiles.shape.layers, p, p}, options);
  cuda::launch_gram(
      stack.const_data_ptr(),
      scalar_kind(stack.scalar_type(), "adasum_gram", "stack"),
      tiles.shape,
      partial.mutable_data_ptr<double>(),
      gram.mutable_data_ptr<double>(),
      c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return gram;
}

at::Tensor combine_of(
    const at::Tensor& stack,
    const at::Tensor& coefficients,
    const Tiles& tiles) {
  at::Tensor out = at::empty({stack.size(1)}, stack.options());
  cuda::launch_combine(
      stack.const_data_ptr(),
      scalar_kind(stack.scalar_type(), "adasum_combine", "stack"),
      tiles.shape,
      coefficients.const_data_ptr<double>(),
      out.mutable_data_ptr(),
      c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

at::Tensor stack_gram_cuda(const at::Tensor& stack, at::IntArrayRef sizes) {
  check_stack(stack, "adasum_gram");
  check_sizes(sizes, stack.size(1), "adasum_gram");
  const c10::cuda::CUDAGuard guard(stack.device());
  const at::Tensor dense = stack.contiguous();
  return gram_of(dense, upload_tiles(dense, sizes));
}

at::Tensor stack_combine_cuda(
    const at::Tensor& stack,
    const at::Tensor& coefficients,
    at::IntArrayRef sizes) {
  check_combine(stack, coefficients, sizes);
  const c10::cuda::CUDAGuard guard(stack.device());
  const at::Tensor dense = stack.contiguous();
  return combine_of(
      dense, coefficients.contiguous(), upload_tiles(dense, sizes));
}

at::Tensor pair_cuda(
    const at::Tensor& a,
    const at::Tensor& b,
    at::IntArrayRef sizes,
    double weight_a,
    double weight_b) {
  check_pair(a, b, sizes, weight_a, weight_b);
  const c10::cuda::CUDAGuard guard(a.device());
  const at::Tensor stack = at::stack({a.reshape({-1}), b.reshape({-1})});
  const Tiles tiles = upload_tiles(stack, sizes);
  Rule rule;
  rule.weights = {weight_a, weight_b};
  const at::Tensor coefficients =
      coefficients_of_layers(gram_of(stack, tiles), rule, {}, {}).values;
  return combine_of(stack, coefficients, tiles).view(a.sizes());
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, CUDA, m) {
  m.impl("adasum_pair", &pair_cuda);
  m.impl("adasum_gram", &stack_gram_cuda);
  m.impl("adasum_coefficients", &coefficients_of_gram);
  m.impl("adasum_combine", &stack_combine_cuda);
}

} // namespace torch_sm3::distributed
