// SPDX-License-Identifier: Apache-2.0
#include <cuda_on_host.h>
#include <torch_sm3/sm3.h>
#include <sm3_kernel.cuh>

#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace torch_sm3 {
namespace {

struct Problem {
  at::Tensor param;
  at::Tensor grad;
  at::Tensor momentum; // undefined without
  std::vector<at::Tensor> accumulators;
  at::Tensor step;

  Problem clone() const {
    Problem copy = *this;
    copy.param = param.clone();
    copy.momentum = momentum.defined() ? momentum.clone() : momentum;
    copy.step = step.clone();
    for (auto& accumulator : copy.accumulators) {
      accumulator = accumulator.clone();
    }
    return copy;
  }
};

Problem make(
    at::IntArrayRef shape,
    at::ScalarType dtype,
    at::ScalarType grad_dtype,
    bool momentum) {
  Problem problem;
  problem.param = at::randn(shape).to(dtype);
  problem.grad = at::randn(shape).to(grad_dtype);
  problem.accumulators = sm3_accumulators(problem.param);
  for (auto& accumulator : problem.accumulators) {
    accumulator.add_(at::randn(accumulator.sizes()).abs());
  }
  if (momentum) {
    problem.momentum = at::randn(shape).to(dtype);
  }
  problem.step = at::zeros({}, at::kLong);
  return problem;
}

constexpr double kLr = 0.1;
constexpr double kMomentum = 0.9;
constexpr double kDecay = 0.01;

void run_cpu(const Problem& problem) {
  std::vector<at::Tensor> momenta;
  if (problem.momentum.defined()) {
    momenta.push_back(problem.momentum);
  }
  sm3_update_(
      {problem.param},
      {problem.grad},
      problem.accumulators,
      momenta,
      {problem.step},
      kLr,
      problem.momentum.defined() ? kMomentum : 0.0,
      1.0,
      std::nullopt,
      kDecay);
}

// Launches the CUDA kernels' bodies on host threads, as sm3_cuda.cpp does on a
// device.
template <class C, class P, class G>
void run_cuda_bodies(const Problem& problem) {
  SM3DeviceTensor<C> t{};
  t.param = problem.param.mutable_data_ptr();
  t.grad = problem.grad.const_data_ptr();
  t.momentum = problem.momentum.defined() ? problem.momentum.mutable_data_ptr()
                                          : nullptr;
  t.dims = static_cast<int>(problem.param.dim());
  t.columns = problem.param.size(-1);
  t.rows = problem.param.numel() / t.columns;
  for (int d = 0; d < t.dims; ++d) {
    t.sizes[d] = problem.param.size(d);
    t.param_strides[d] = problem.param.stride(d);
    t.grad_strides[d] = problem.grad.stride(d);
    t.momentum_strides[d] =
        problem.momentum.defined() ? problem.momentum.stride(d) : 0;
  }
  const auto k = sm3_coefficients<C>(
      {kLr,
       t.momentum != nullptr ? kMomentum : 0.0,
       1.0,
       1e-30,
       kDecay,
       false});
  if (problem.accumulators.size() == 1) {
    t.diagonal = problem.accumulators[0].mutable_data_ptr<C>();
    const auto blocks = (problem.param.numel() + kSM3Threads - 1) / kSM3Threads;
    cuda_on_host::launch(
        static_cast<unsigned>(blocks),
        kSM3Threads,
        &sm3_diagonal_kernel<C, P, G>,
        t,
        k);
    return;
  }
  std::vector<at::Tensor> fresh;
  for (int d = 0; d < t.dims; ++d) {
    fresh.push_back(at::zeros_like(problem.accumulators[d]));
    t.old_numbers[d] = problem.accumulators[d].const_data_ptr<C>();
    t.new_numbers[d] = fresh[d].mutable_data_ptr<C>();
  }
  const auto blocks = (t.columns + kSM3Threads - 1) / kSM3Threads *
                      ((t.rows + kSM3Rows - 1) / kSM3Rows);
  cuda_on_host::launch(
      static_cast<unsigned>(blocks),
      kSM3Threads,
      &sm3_rows_kernel<C, P, G>,
      t,
      k);
  for (int d = 0; d < t.dims; ++d) {
    problem.accumulators[d].copy_(fresh[d]);
  }
}

void expect_equal(const Problem& cpu, const Problem& cuda) {
  EXPECT_TRUE(at::equal(cpu.param, cuda.param));
  for (size_t i = 0; i < cpu.accumulators.size(); ++i) {
    EXPECT_TRUE(at::equal(cpu.accumulators[i], cuda.accumulators[i])) << i;
  }
  if (cpu.momentum.defined()) {
    EXPECT_TRUE(at::equal(cpu.momentum, cuda.momentum));
  }
}

template <class C, class P, class G>
void compare(
    at::IntArrayRef shape,
    at::ScalarType dtype,
    at::ScalarType grad_dtype) {
  for (const bool momentum : {false, true}) {
    const Problem cpu = make(shape, dtype, grad_dtype, momentum);
    const Problem cuda = cpu.clone();
    for (int step = 0; step < 2; ++step) {
      run_cpu(cpu);
      run_cuda_bodies<C, P, G>(cuda);
      expect_equal(cpu, cuda);
    }
  }
}

TEST(SM3Cuda, MatrixHasTheBitsOfTheCpu) {
  // More than one tile of rows and of columns, both with a remainder.
  compare<float, float, float>({37, 300}, at::kFloat, at::kFloat);
}

TEST(SM3Cuda, HigherRanksHaveTheBitsOfTheCpu) {
  compare<float, float, float>({3, 5, 7}, at::kFloat, at::kFloat);
  compare<float, float, float>({2, 3, 2, 4, 3}, at::kFloat, at::kFloat);
}

TEST(SM3Cuda, DiagonalHasTheBitsOfTheCpu) {
  compare<float, float, float>({300}, at::kFloat, at::kFloat);
  compare<float, float, float>({2, 2}, at::kFloat, at::kFloat);
}

TEST(SM3Cuda, EveryDtypeHasTheBitsOfTheCpu) {
  compare<double, double, double>({9, 40}, at::kDouble, at::kDouble);
  compare<double, double, Half>({9, 40}, at::kDouble, at::kHalf);
  compare<float, BFloat16, BFloat16>({9, 40}, at::kBFloat16, at::kBFloat16);
  compare<float, Half, float>({9, 40}, at::kHalf, at::kFloat);
  compare<float, float, BFloat16>({40}, at::kFloat, at::kBFloat16);
}

TEST(SM3Cuda, NonFiniteGradientsHaveTheBitsOfTheCpu) {
  Problem cpu = make({8, 40}, at::kFloat, at::kFloat, true);
  cpu.grad[1][2] = std::numeric_limits<float>::infinity();
  cpu.grad[3][4] = 1e30f;
  const Problem cuda = cpu.clone();
  run_cpu(cpu);
  run_cuda_bodies<float, float, float>(cuda);
  // NaN is in one place of both.
  EXPECT_TRUE(at::equal(cpu.param.isnan(), cuda.param.isnan()));
  EXPECT_EQ(cpu.param.isnan().sum().item<int64_t>(), 1);
  EXPECT_TRUE(at::equal(cpu.param.nan_to_num(), cuda.param.nan_to_num()));
  for (size_t i = 0; i < cpu.accumulators.size(); ++i) {
    EXPECT_TRUE(at::equal(cpu.accumulators[i], cuda.accumulators[i]));
    EXPECT_TRUE(cpu.accumulators[i].isfinite().all().item<bool>());
  }
}

TEST(SM3, StridesHaveEqualBits) {
  const Problem one = make({6, 5}, at::kFloat, at::kFloat, false);
  Problem other = one.clone();
  other.grad = one.grad.t().contiguous().t();
  other.param = one.param.t().contiguous().t();
  run_cpu(one);
  run_cpu(other);
  expect_equal(one, other);
}

TEST(SM3, BadInputNamesTheArgumentAndWritesNothing) {
  const Problem problem = make({6, 5}, at::kFloat, at::kFloat, false);
  const Problem before = problem.clone();
  try {
    sm3_update_(
        {problem.param},
        {problem.grad.t()},
        problem.accumulators,
        {},
        {problem.step},
        kLr);
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
