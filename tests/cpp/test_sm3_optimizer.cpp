// SPDX-License-Identifier: Apache-2.0
// What torch asks of its own C++ optimizers, under torch's names.
#include <sm3_face_helpers.h>
#include <sm3_values.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/binary_cross_entropy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tensor.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>

#include <cmath>

namespace torch_sm3::optim {
namespace {

using torch::optim::OptimizerParamGroup;

// Two linear layers, each followed by a sigmoid.
struct Network {
  std::vector<at::Tensor> params;

  Network(int64_t in, int64_t hidden)
      : params(leaves({{hidden, in}, {hidden}, {1, hidden}, {1}})) {}

  at::Tensor operator()(const at::Tensor& x) const {
    const at::Tensor h = at::sigmoid(at::linear(x, params[0], params[1]));
    return at::sigmoid(at::linear(h, params[2], params[3]));
  }
};

bool learns_xor(const SM3Options& options) {
  at::manual_seed(0);
  const Network network(2, 8);
  SM3 optimizer(network.params, options);
  double running_loss = 1;
  for (int epoch = 0; running_loss > 0.1; ++epoch) {
    if (epoch > 3000) {
      return false;
    }
    const at::Tensor bits = at::randint(2, {4, 2}).to(at::kFloat);
    const at::Tensor labels = bits.select(1, 0).ne(bits.select(1, 1));
    optimizer.zero_grad();
    const at::Tensor loss = at::binary_cross_entropy(
        network(bits).reshape(-1), labels.to(at::kFloat));
    loss.backward();
    optimizer.step();
    running_loss = running_loss * 0.99 + loss.item<double>() * 0.01;
  }
  return true;
}

void check_exact_values(
    const SM3Options& options,
    const expected::Samples& expected) {
  const std::vector<std::vector<double>> start{
      {-0.2109, -0.4976, -0.1413, -0.3420, -0.2524, 0.6976},
      {-0.1085, -0.2979, 0.6892},
      {-0.0508, -0.3941, -0.2843},
      {-0.0711}};
  Network network(2, 3);
  for (size_t p = 0; p < start.size(); ++p) {
    network.params[p] =
        leaf(at::tensor(start[p]).reshape(network.params[p].sizes()));
  }
  SM3 optimizer(network.params, options);
  const at::Tensor input =
      at::tensor(std::vector<double>{0.1, 0.2, 0.3, 0.4, 0.5, 0.6})
          .reshape({3, 2});
  for (size_t i = 0; i < 1001; ++i) {
    optimizer.zero_grad();
    network(input).sum().backward();
    optimizer.step([] { return at::tensor(10); });
    if (i % 100 == 0) {
      std::vector<at::Tensor> flat;
      for (const at::Tensor& param : network.params) {
        flat.push_back(param.detach().reshape(-1));
      }
      const auto& sample = expected.at(i / 100);
      const at::Tensor right =
          at::tensor(std::vector<double>(sample.begin(), sample.end()));
      ASSERT_TRUE(at::allclose(at::cat(flat), right, 1e-9, 1e-9))
          << "step " << i << ": " << at::cat(flat) << right;
    }
  }
}

TEST(OptimTest, OptimizerAccessors) {
  const SM3Options options(1.0);
  const std::vector<at::Tensor> params = leaves({{10}, {10}, {10}});
  SM3 optimizer(params, options);
  EXPECT_TRUE(options == static_cast<SM3Options&>(optimizer.defaults()));
  auto& groups = optimizer.param_groups();
  groups.emplace_back(params);
  expect_equal(groups[1].params(), params);
  EXPECT_EQ(
      error_of([&] { optimizer.add_param_group(OptimizerParamGroup(params)); }),
      "some parameters appear in more than one parameter group");
  groups.pop_back();
  optimizer.init_state();
  SM3ParamState& state = state_of(optimizer, params[0]);
  state.step(state.step() + 1);
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<int64_t>(), 1);

  const SM3& constant = optimizer;
  constant.defaults();
  EXPECT_EQ(constant.param_groups().size(), 1);
  EXPECT_EQ(constant.state().size(), 3);
}

TEST(OptimTest, XORConvergence_SM3) {
  EXPECT_TRUE(learns_xor(SM3Options(1.0)));
}

TEST(OptimTest, XORConvergence_SM3WithMomentum) {
  EXPECT_TRUE(learns_xor(SM3Options(1.0).momentum(0.9).weight_decay(1e-6)));
}

TEST(OptimTest, XORConvergence_SM3I) {
  EXPECT_TRUE(learns_xor(SM3Options(1.0).variant("I")));
}

TEST(OptimTest, ProducesPyTorchValues_SM3) {
  check_exact_values(SM3Options(), expected::kSM3);
}

TEST(OptimTest, ProducesPyTorchValues_SM3WithMomentum) {
  check_exact_values(SM3Options().momentum(0.9), expected::kSM3WithMomentum);
}

TEST(OptimTest, ProducesPyTorchValues_SM3WithWeightDecay) {
  check_exact_values(
      SM3Options().weight_decay(1e-2), expected::kSM3WithWeightDecay);
}

TEST(OptimTest, ProducesPyTorchValues_SM3WithWeightDecayAndMomentum) {
  check_exact_values(
      SM3Options().weight_decay(1e-2).momentum(0.9),
      expected::kSM3WithWeightDecayAndMomentum);
}

TEST(OptimTest, ProducesPyTorchValues_SM3WithBeta2) {
  check_exact_values(SM3Options(0.01).beta2(0.9), expected::kSM3WithBeta2);
}

TEST(OptimTest, ProducesPyTorchValues_SM3I) {
  check_exact_values(SM3Options().variant("I"), expected::kSM3I);
}

TEST(OptimTest, ProducesPyTorchValues_SM3IWithBeta2AndMomentum) {
  check_exact_values(
      SM3Options(0.01).variant("I").beta2(0.9).momentum(0.9),
      expected::kSM3IWithBeta2AndMomentum);
}

TEST(OptimTest, ZeroGrad) {
  at::manual_seed(0);
  const Network network(2, 8);
  SM3 optimizer(network.params, 0.1);
  for (const at::Tensor& param : network.params) {
    ASSERT_FALSE(param.grad().defined());
  }
  const auto backward = [&] { network(at::randn({5, 2})).sum().backward(); };
  backward();
  for (const at::Tensor& param : network.params) {
    ASSERT_TRUE(param.grad().defined());
    EXPECT_NE(param.grad().abs().sum().item<float>(), 0);
  }
  optimizer.zero_grad();
  for (const at::Tensor& param : network.params) {
    EXPECT_FALSE(param.grad().defined());
  }
  backward();
  optimizer.zero_grad(/*set_to_none=*/false);
  for (const at::Tensor& param : network.params) {
    EXPECT_EQ(param.grad().abs().sum().item<float>(), 0);
  }
}

TEST(OptimTest, ExternalVectorOfParameters) {
  at::manual_seed(0);
  const std::vector<at::Tensor> params{
      at::randn({2, 2}), at::randn({3, 3}), at::randn({4, 4})};
  std::vector<at::Tensor> expected;
  for (const at::Tensor& param : params) {
    param.mutable_grad() = at::ones_like(param);
    expected.push_back(param - 1.0);
  }
  SM3 optimizer(params, 1.0);
  optimizer.step();
  expect_equal(params, expected);
}

TEST(OptimTest, CheckLRChange_StepLR_SM3) {
  const std::vector<at::Tensor> params = leaves({{3, 4}});
  SM3 optimizer(params, SM3Options(0.5));
  torch::optim::StepLR scheduler(optimizer, 20, 0.5);
  for (int epoch = 0; epoch <= 60; ++epoch) {
    // torch's first call of step() leaves the rate.
    EXPECT_DOUBLE_EQ(
        options_of(optimizer).lr(), 0.5 * std::pow(0.5, (epoch - 1) / 20))
        << epoch;
    set_grads(params, epoch);
    const at::Tensor before = params[0].detach().clone();
    optimizer.step();
    // The rate of the group is the one that the step takes.
    const at::Tensor moved = (params[0].detach() - before).abs().max();
    EXPECT_LE(moved.item<double>(), options_of(optimizer).lr() * 1.000001);
    scheduler.step();
  }
}

TEST(OptimTest, CheckLRChange_ReduceLROnPlateau_SM3) {
  SM3 optimizer(leaves({{3, 4}}), SM3Options(0.1));
  torch::optim::ReduceLROnPlateauScheduler scheduler(
      optimizer,
      torch::optim::ReduceLROnPlateauScheduler::min,
      /*factor=*/0.1,
      /*patience=*/5);
  for (int epoch = 0; epoch <= 12; ++epoch) {
    optimizer.step();
    scheduler.step(5.0);
    const double expected = epoch < 6 ? 0.1 : epoch < 12 ? 0.01 : 0.001;
    EXPECT_NEAR(options_of(optimizer).lr(), expected, 1e-8) << epoch;
  }
}

TEST(OptimTest, TheClosureHasGradients) {
  const std::vector<at::Tensor> params = leaves({{3, 4}});
  SM3 optimizer(params, 0.1);
  const at::Tensor before = params[0].detach().clone();
  const at::NoGradGuard no_grad;
  const at::Tensor loss = optimizer.step([&] {
    optimizer.zero_grad();
    at::Tensor value = params[0].square().sum();
    value.backward();
    return value;
  });
  EXPECT_FLOAT_EQ(loss.item<float>(), before.square().sum().item<float>());
  EXPECT_FALSE(params[0].equal(before));
  EXPECT_FALSE(optimizer.step().defined());
}

} // namespace
} // namespace torch_sm3::optim
