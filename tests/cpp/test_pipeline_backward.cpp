// SPDX-License-Identifier: Apache-2.0
// The backward of one stage in a program without Python.
#include <torch_sm3/pipeline/backward.h>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <memory>
#include <vector>

namespace {

using torch_sm3::pipeline::Split;
using torch_sm3::pipeline::split_of;
using torch_sm3::pipeline::StageBackward;

// A product that may not run twice.
struct Once : torch::autograd::Function<Once> {
  static at::Tensor forward(
      torch::autograd::AutogradContext* ctx,
      const at::Tensor& x,
      const at::Tensor& w) {
    ctx->save_for_backward({x, w});
    return x * w;
  }
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext* ctx,
      torch::autograd::tensor_list grads) {
    ++runs;
    const auto saved = ctx->get_saved_variables();
    return {grads[0] * saved[1], (grads[0] * saved[0]).sum(0)};
  }
  static int runs;
};
int Once::runs = 0;

struct Net : torch::nn::Module {
  Net() {
    register_module("a", a);
    register_module("norm", norm);
    register_module("b", b);
    w = register_parameter("w", at::rand({4}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return b(Once::apply(at::tanh(norm(a(x))), w)) + w;
  }
  torch::nn::Linear a{4, 4};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({4})};
  torch::nn::Linear b{4, 4};
  at::Tensor w;
};

std::vector<at::Tensor> gradients_of(Net& net) {
  std::vector<at::Tensor> found;
  for (const auto& weight : net.parameters()) {
    found.push_back(weight.grad().clone());
    weight.mutable_grad() = at::Tensor();
  }
  return found;
}

class PipelineBackward : public ::testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(1);
    net = std::make_shared<Net>();
    x = at::rand({3, 4});
    gradient = at::rand({3, 4});
    auto leaf = x.clone().requires_grad_();
    net->forward(leaf).backward(gradient);
    expected = gradients_of(*net);
    expected.push_back(leaf.grad());
    Once::runs = 0;
  }

  void expect_same(std::vector<at::Tensor> found, const at::Tensor& input) {
    found.push_back(input);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
    }
  }

  at::Tensor forward(StageBackward& one) {
    auto y = net->forward(one.enter({x}, {true})[0]);
    one.leave({y});
    return y;
  }

  std::shared_ptr<Net> net;
  at::Tensor x;
  at::Tensor gradient;
  std::vector<at::Tensor> expected;
};

TEST_F(PipelineBackward, WholeHasTheBitsOfTorch) {
  StageBackward one;
  const auto y = forward(one);
  EXPECT_EQ(one.free({y}), std::vector<bool>{true});
  EXPECT_EQ(y.storage().nbytes(), sizeof(float));
  const auto found = one.full({gradient});
  expect_same(gradients_of(*net), found[0]);
}

TEST_F(PipelineBackward, PartsHaveTheBitsOfTorch) {
  StageBackward one;
  forward(one);
  const auto found = one.input({gradient}, Split::kAlways);
  for (const auto& weight : net->parameters()) {
    EXPECT_FALSE(weight.grad().defined());
  }
  EXPECT_TRUE(one.owes_weight());
  one.weight();
  EXPECT_FALSE(one.owes_weight());
  expect_same(gradients_of(*net), found[0]);
  EXPECT_EQ(Once::runs, 1);
}

TEST_F(PipelineBackward, SeveralMicrobatchesMayBeOpen) {
  std::vector<StageBackward> open(3);
  for (auto& one : open) {
    forward(one);
  }
  for (auto& one : open) {
    one.input({gradient});
  }
  for (auto& one : open) {
    one.weight();
  }
  std::vector<at::Tensor> found = gradients_of(*net);
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(at::equal(found[i], expected[i] + expected[i] + expected[i]));
  }
}

TEST_F(PipelineBackward, AbsentGradientsAndOutputsWithoutGraph) {
  StageBackward one;
  const auto inner = one.enter({x, x}, {true, false});
  EXPECT_TRUE(inner[0].requires_grad() && !inner[0].is_leaf());
  EXPECT_TRUE(inner[1].is_same(x));
  one.leave({net->forward(inner[0]), at::ones({2}), at::Tensor()});
  const auto found = one.input({at::Tensor(), at::ones({2}), {}});
  ASSERT_EQ(found.size(), 2);
  EXPECT_FALSE(found[0].defined() || found[1].defined());
  EXPECT_FALSE(one.owes_weight());
  one.weight();
}

TEST_F(PipelineBackward, NothingToSplit) {
  StageBackward one;
  one.leave({one.enter({x}, {true})[0] * 2});
  EXPECT_THROW(one.input({gradient}, Split::kAlways), c10::ValueError);
}

TEST(PipelineSplit, HasThreeNames) {
  EXPECT_EQ(split_of("auto"), Split::kAuto);
  EXPECT_EQ(split_of("always"), Split::kAlways);
  EXPECT_EQ(split_of("never"), Split::kNever);
  EXPECT_THROW(split_of("True"), c10::ValueError);
}

} // namespace
