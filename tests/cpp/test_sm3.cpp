// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/sm3.h>

#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace torch_sm3 {
namespace {

struct Problem {
  at::Tensor param;
  at::Tensor grad;
  std::vector<at::Tensor> accumulators;
  at::Tensor step;

  Problem clone() const {
    Problem copy{param.clone(), grad, {}, step.clone()};
    for (const at::Tensor& accumulator : accumulators) {
      copy.accumulators.push_back(accumulator.clone());
    }
    return copy;
  }
};

Problem make(at::IntArrayRef shape) {
  const at::Tensor param = at::randn(shape);
  return {
      param,
      at::randn(shape),
      sm3_accumulators(param),
      at::zeros({}, at::kLong)};
}

void update(const Problem& p) {
  sm3_update_({p.param}, {p.grad}, p.accumulators, {}, {}, {}, {p.step}, 0.1);
}

void expect_equal(const Problem& one, const Problem& other) {
  EXPECT_TRUE(at::equal(one.param, other.param));
  for (size_t i = 0; i < one.accumulators.size(); ++i) {
    EXPECT_TRUE(at::equal(one.accumulators[i], other.accumulators[i])) << i;
  }
}

TEST(SM3, StridesHaveEqualBits) {
  const Problem one = make({6, 5});
  Problem other = one.clone();
  other.grad = one.grad.t().contiguous().t();
  other.param = one.param.t().contiguous().t();
  update(one);
  update(other);
  expect_equal(one, other);
}

TEST(SM3, BadInputNamesTheArgumentAndWritesNothing) {
  Problem problem = make({6, 5});
  const Problem before = problem.clone();
  problem.grad = problem.grad.t();
  try {
    update(problem);
    FAIL() << "expected an error";
  } catch (const c10::ValueError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_EQ(
        text,
        "sm3_update_: expected shape [6, 5] at index 0, but got [5, 6] "
        "(argument 'grads')");
  }
  expect_equal(before, problem);
  EXPECT_EQ(problem.step.item<int64_t>(), 0);
}

TEST(SM3, CoversHaveOneNumberPerRowAndColumn) {
  const auto sizes = [](at::IntArrayRef shape) {
    std::vector<int64_t> all;
    for (const auto& accumulator : sm3_accumulators(at::zeros(shape))) {
      all.push_back(accumulator.numel());
    }
    return all;
  };
  using Sizes = std::vector<int64_t>;
  EXPECT_EQ(sizes({4, 7}), (Sizes{4, 7}));
  EXPECT_EQ(sizes({4, 1, 7, 3}), (Sizes{4, 7, 3}));
  EXPECT_EQ(sizes({2, 2}), (Sizes{4}));
  EXPECT_EQ(sizes({1, 9}), (Sizes{9}));
  EXPECT_EQ(sizes({}), (Sizes{1}));
  EXPECT_EQ(sizes({0, 3}), (Sizes{0}));
}

} // namespace
} // namespace torch_sm3
