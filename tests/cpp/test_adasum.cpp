// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/distributed.h>

#include <ATen/TensorOperators.h>
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

TEST(Adasum, KeepsEveryBitOfOneRank) {
  at::Tensor leaf = random(1, 5, at::kFloat);
  leaf[0][0] = -0.0;
  leaf[0][1] = std::numeric_limits<float>::quiet_NaN();
  leaf[0][2] = 1e-42f;
  const at::Tensor result = reduce(leaf, {5});
  EXPECT_TRUE(at::equal(result.view(at::kInt), leaf[0].view(at::kInt)));
}

TEST(Adasum, CommutesWithPowersOfTwo) {
  const at::Tensor stack = random(5, 300, at::kFloat);
  const at::Tensor gram = adasum_gram(stack, {c10::SymInt(300)});
  for (const int power : {-41, -2, 1, 30}) {
    const double factor = std::ldexp(1.0, power);
    EXPECT_TRUE(
        at::equal(
            reduce(stack * factor, {300}), reduce(stack, {300}) * factor));
    EXPECT_TRUE(
        at::equal(
            adasum_coefficients(gram * factor), adasum_coefficients(gram)));
  }
}

TEST(Adasum, CombinesTheEndsOfFloat64InPairs) {
  const at::Tensor stack = random(2, 64, at::kDouble);
  const at::Tensor plain = adasum_pair(stack[0], stack[1], {c10::SymInt(64)});
  for (const double size : {0x1p-1000, 0x1p990}) {
    const at::Tensor far = stack * size;
    EXPECT_TRUE(
        at::equal(
            adasum_pair(far[0], far[1], {c10::SymInt(64)}), plain * size));
  }
}

TEST(Adasum, ReturnsAGivenType) {
  const at::Tensor stack = random(3, 500, at::kHalf);
  const std::vector<c10::SymInt> sizes = {500};
  const at::Tensor c = adasum_coefficients(adasum_gram(stack, sizes));
  const at::Tensor exact = adasum_combine(stack, c, sizes, at::kDouble);
  const at::Tensor wide = adasum_combine(stack, c, sizes, at::kFloat);
  EXPECT_TRUE(at::equal(wide, exact.to(at::kFloat)));
  const at::Tensor narrow = adasum_combine(stack, c, sizes, at::kBFloat16);
  EXPECT_TRUE(
      ((narrow - exact).abs() <= 0x1p-8 * exact.abs()).all().item<bool>());
}

TEST(Adasum, TakesWeightsAndNodes) {
  const at::Tensor stack = random(6, 200, at::kDouble);
  const at::Tensor gram = adasum_gram(stack, {c10::SymInt(200)});
  const at::Tensor flat = adasum_coefficients(gram);
  const std::vector<int64_t> pairs = {2, 2, 2};
  EXPECT_TRUE(
      at::equal(adasum_coefficients(gram, "tree", {}, pairs, "adasum"), flat));
  const at::Tensor means = adasum_coefficients(gram, "tree", {}, pairs, "mean");
  EXPECT_FALSE(at::equal(means, flat));
  EXPECT_TRUE(at::equal(means[0][0], means[0][1]));
  // Twice the weight is the same rank twice: ((0, 0), 1).
  const at::Tensor twice =
      at::cat({stack.narrow(0, 0, 1), stack.narrow(0, 0, 2)}, 0);
  const at::Tensor two = adasum_gram(stack.narrow(0, 0, 2), {c10::SymInt(200)});
  const at::Tensor three = adasum_gram(twice, {c10::SymInt(200)});
  at::Tensor weights = at::ones({2}, at::kDouble);
  weights[0] = 2.0;
  const at::Tensor got = adasum_coefficients(two, "tree", weights);
  const at::Tensor want = adasum_coefficients(three);
  EXPECT_NEAR(
      got[0][0].item<double>(),
      (want[0][0] + want[0][1]).item<double>(),
      1e-14);
  EXPECT_NEAR(got[0][1].item<double>(), want[0][2].item<double>(), 1e-14);
}

TEST(Adasum, RefusesAnUnknownMode) {
  EXPECT_THROW(
      adasum_coefficients(at::ones({1, 2, 2}, at::kDouble), "median"),
      c10::ValueError);
}

} // namespace
} // namespace torch_sm3::distributed
