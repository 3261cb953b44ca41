// SPDX-License-Identifier: Apache-2.0
#include <cuda_on_host.h>

#include <adasum_kernel.cuh>

#include <torch_sm3/distributed.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace torch_sm3::distributed {
namespace {

at::Tensor random(int64_t p, int64_t n, at::ScalarType dtype) {
  return at::randn({p, n}, at::kDouble).to(dtype);
}

at::Tensor reduce(
    const at::Tensor& stack,
    const std::vector<int64_t>& sizes,
    std::string_view mode = "tree") {
  const auto layers = c10::fromIntArrayRefSlow(sizes);
  const at::Tensor gram = adasum_gram(stack, layers);
  return adasum_combine(stack, adasum_coefficients(gram, mode), layers);
}

// The layers' tiles as the CUDA kernels see them, by the definition.
struct Table {
  explicit Table(const std::vector<int64_t>& sizes) : first{0} {
    int64_t begin = 0;
    for (size_t l = 0; l < sizes.size(); ++l) {
      for (int64_t e = 0; e < sizes[l]; e += kTile) {
        start.push_back(begin + e);
        size.push_back(std::min(kTile, sizes[l] - e));
        layer.push_back(static_cast<int64_t>(l));
      }
      first.push_back(static_cast<int64_t>(start.size()));
      begin += sizes[l];
    }
  }
  cuda::TileTable view() const {
    return {start.data(), size.data(), layer.data(), first.data()};
  }
  std::vector<int64_t> start, size, layer, first;
};

// A block of the shim is 256 host threads, so the sizes are the smallest that
// reach a second tile, a second strip, an empty and a short layer.
template <class T>
void cuda_equals_cpu(at::ScalarType dtype, const std::vector<int64_t>& worlds) {
  for (const int64_t p : worlds) {
    const std::vector<int64_t> sizes = {3, 16400, 0, 2049};
    const auto layers = static_cast<int64_t>(sizes.size());
    const at::Tensor stack = random(p, 18452, dtype);
    const Table table(sizes);
    const auto tiles = static_cast<unsigned>(table.start.size());
    const auto* data = static_cast<const T*>(stack.const_data_ptr());

    at::Tensor partial =
        at::zeros({static_cast<int64_t>(tiles), pair_count(p)}, at::kDouble);
    at::Tensor gram = at::zeros({layers, p, p}, at::kDouble);
    cuda_on_host::launch(
        dim3(tiles, static_cast<unsigned>(pair_count(p))),
        cuda::kThreads,
        cuda::dots<T>,
        data,
        p,
        stack.size(1),
        table.view(),
        partial.mutable_data_ptr<double>());
    cuda_on_host::launch(
        1,
        static_cast<unsigned>(layers * p * p),
        cuda::add_tiles,
        partial.const_data_ptr<double>(),
        layers,
        p,
        table.view(),
        gram.mutable_data_ptr<double>());
    const auto symbolic = c10::fromIntArrayRefSlow(sizes);
    EXPECT_TRUE(at::equal(gram, adasum_gram(stack, symbolic)));

    const at::Tensor c = adasum_coefficients(gram);
    at::Tensor out = at::zeros({stack.size(1)}, dtype);
    cuda_on_host::launch(
        tiles,
        cuda::kThreads,
        cuda::combine<T>,
        data,
        p,
        stack.size(1),
        c.const_data_ptr<double>(),
        table.view(),
        static_cast<T*>(out.mutable_data_ptr()));
    EXPECT_TRUE(at::equal(out, adasum_combine(stack, c, symbolic)));
  }
}

TEST(AdasumCuda, HasTheBitsOfTheCpuKernels) {
  cuda_equals_cpu<float>(at::kFloat, {1, 3});
  cuda_equals_cpu<double>(at::kDouble, {2});
  cuda_equals_cpu<Half>(at::kHalf, {2});
  cuda_equals_cpu<BFloat16>(at::kBFloat16, {2});
}

// The order of additions written down once more, element by element.
double dot_in_order(const double* a, const double* b, int64_t size) {
  double total = 0.0;
  for (int64_t tile = 0; tile < size; tile += 16384) {
    const int64_t end_of_tile = std::min(size, tile + 16384);
    double of_tile = 0.0;
    for (int64_t strip = tile; strip < end_of_tile; strip += 2048) {
      double lanes[32] = {};
      for (int64_t e = strip; e < std::min(end_of_tile, strip + 2048); ++e) {
        lanes[(e - strip) % 32] += a[e] * b[e];
      }
      for (int half = 16; half > 0; half /= 2) {
        for (int lane = 0; lane < half; ++lane) {
          lanes[lane] += lanes[lane + half];
        }
      }
      of_tile += lanes[0];
    }
    total += of_tile;
  }
  return total;
}

TEST(Adasum, AddsInTheDocumentedOrder) {
  for (const int64_t size : {1, 31, 33, 2047, 2049, 16385, 50001}) {
    const at::Tensor stack = random(2, size, at::kDouble);
    const at::Tensor gram = adasum_gram(stack, {c10::SymInt(size)});
    const double* a = stack.const_data_ptr<double>();
    const double* got = gram.const_data_ptr<double>();
    EXPECT_EQ(got[0], dot_in_order(a, a, size));
    EXPECT_EQ(got[1], dot_in_order(a, a + size, size));
    EXPECT_EQ(got[2], got[1]);
    EXPECT_EQ(got[3], dot_in_order(a + size, a + size, size));
  }
}

TEST(Adasum, AveragesEqualLeavesAndAddsOrthogonalOnes) {
  const at::Tensor leaf = random(1, 100, at::kFloat);
  EXPECT_TRUE(
      at::equal(reduce(at::cat({leaf, leaf, leaf, leaf}), {100}), leaf[0]));
  at::Tensor stack = at::zeros({3, 6}, at::kFloat);
  for (int64_t i = 0; i < 3; ++i) {
    stack[i][2 * i] = 1.5 + static_cast<double>(i);
  }
  EXPECT_TRUE(at::equal(reduce(stack, {6}), stack.sum(0)));
}

TEST(Adasum, PairHasTheBitsOfTheTree) {
  const at::Tensor stack = random(2, 5000, at::kFloat);
  const std::vector<c10::SymInt> sizes = {10, 4990};
  EXPECT_TRUE(
      at::equal(
          adasum_pair(stack[0], stack[1], sizes), reduce(stack, {10, 4990})));
}

TEST(Adasum, SpoilsOnlyTheLayerOfABadElement) {
  at::Tensor stack = random(3, 30, at::kFloat);
  stack[2][12] = std::numeric_limits<float>::infinity();
  const at::Tensor result = reduce(stack, {10, 10, 10});
  EXPECT_TRUE(result.narrow(0, 10, 10).isnan().all().item<bool>());
  EXPECT_EQ(result.isnan().sum().item<int64_t>(), 10);
}

TEST(Adasum, LeavesOutZeroLeaves) {
  const at::Tensor leaf = random(1, 64, at::kFloat);
  const at::Tensor zero = at::zeros({1, 64}, at::kFloat);
  EXPECT_TRUE(
      at::equal(reduce(at::cat({zero, leaf, zero, zero}), {64}), leaf[0]));
  EXPECT_TRUE(at::equal(reduce(at::cat({zero, zero}), {64}), zero[0]));
}

TEST(Adasum, RefusesAnUnknownMode) {
  EXPECT_THROW(
      adasum_coefficients(at::ones({1, 2, 2}, at::kDouble), "median"),
      c10::ValueError);
}

} // namespace
} // namespace torch_sm3::distributed
