// SPDX-License-Identifier: Apache-2.0
#include <reversible_kinds.h>

#include <ATen/CPUGeneratorImpl.h>

#include <string>
#include <thread>

namespace torch_sm3::reversible {
namespace {

class ReversibleSequence : public ReversibleModules {};

TEST_F(ReversibleSequence, TwoThreadsTrainOneSequence) {
  Sequence sequence = chain(kinds()[0]);
  const std::vector<Tensors> inputs{streams(2), streams(2), streams(2)};
  std::vector<Tensors> got(inputs.size());
  std::vector<std::thread> threads;
  for (size_t t = 0; t < inputs.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 5; ++i) {
        got[t] = gradients(
            loss_of(sequence->forward(inputs[t])),
            inputs[t],
            sequence->parameters());
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (size_t t = 0; t < inputs.size(); ++t) {
    expect_equal(
        got[t],
        gradients(
            loss_of(sequence->forward(inputs[t])),
            inputs[t],
            sequence->parameters()));
  }
}

TEST_F(ReversibleSequence, HooksFireOnceAlsoOfTiedParameters) {
  nn::Linear tied = linear();
  Sequence sequence(
      Blocks{
          AdditiveCoupling(tied, linear()), AdditiveCoupling(linear(), tied)});
  sequence->to(at::kDouble);
  int calls = 0;
  tied->weight.register_hook([&calls](const at::Tensor& grad) {
    ++calls;
    return grad * 2;
  });
  const Tensors x = streams(2);
  loss_of(sequence->forward(x)).backward();
  EXPECT_EQ(1, calls);
  const at::Tensor got = tied->weight.grad().clone();
  const auto first = (*sequence)[0], second = (*sequence)[1];
  const auto want = gradients(
      loss_of(second->forward(first->forward(x))), {}, {tied->weight});
  expect_close({got}, want);
}

TEST_F(ReversibleSequence, SeekAndRestart) {
  Sequence sequence = chain(kinds()[0]);
  const Tensors x = streams(2);
  const Tensors y = sequence->forward(x);
  const Tensors z = formula(kinds()[0], *sequence, x);
  const Tensors parameters = sequence->parameters();
  // Single inputs, single outputs, in both orders; a pass may skip nodes.
  for (const size_t out : {size_t{1}, size_t{0}}) {
    for (const Tensors& inputs :
         {Tensors{x[0]}, Tensors{parameters[0]}, Tensors{parameters.back()}}) {
      const auto grad = [&](const Tensors& from) {
        return torch::autograd::grad(
            {from[out].square().sum()}, inputs, {}, true, false, true);
      };
      expect_close(grad(y), grad(z));
    }
  }
  // With retain_graph the same bits again, without it torch's own error.
  const at::Tensor loss = loss_of(y);
  const auto grad = [&](bool retain) {
    return torch::autograd::grad({loss}, parameters, {}, retain);
  };
  const Tensors first = grad(true);
  expect_equal(first, grad(false));
  EXPECT_THROW(grad(false), c10::Error);
}

TEST_F(ReversibleSequence, ABlockThatTheLossDoesNotReach) {
  Sequence sequence(Blocks{HalfResidual(linear()), HalfResidual(linear())});
  sequence->to(at::kDouble);
  const Tensors x = streams(2);
  sequence->forward(x)[1].sum().backward();
  for (const at::Tensor& p : sequence->parameters()) {
    EXPECT_FALSE(p.grad().defined());
  }
}

struct InnerImpl : nn::Module {
  InnerImpl()
      : sequence(register_module(
            "sequence",
            Sequence(
                Blocks{AdditiveCoupling(
                    nn::Sequential(linear(), nn::Dropout(0.3)),
                    linear())}))) {}
  at::Tensor forward(const at::Tensor& x) {
    const Tensors y = sequence->forward({x, x});
    return y[0] * y[1];
  }
  Sequence sequence;
};
TORCH_MODULE(Inner);

TEST_F(ReversibleSequence, ASequenceInsideF) {
  Sequence sequence(Blocks{AdditiveCoupling(Inner(), Inner())});
  sequence->to(at::kDouble);
  const Tensors x = streams(2);
  at::manual_seed(5);
  const auto got =
      gradients(loss_of(sequence->forward(x)), x, sequence->parameters());
  at::manual_seed(5);
  const auto block = (*sequence)[0];
  expect_close(
      got, gradients(loss_of(block->forward(x)), x, sequence->parameters()));
}

TEST_F(ReversibleSequence, WithoutGradItIsABareLoop) {
  Sequence sequence = chain(kinds()[0]);
  const Tensors x = streams(2);
  const at::Generator& generator = at::detail::getDefaultCPUGenerator();
  const at::Tensor state = generator.get_state();
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(sequence->forward(x)[0].requires_grad());
  }
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(sequence->forward(x)[0].is_inference());
  }
  for (const at::Tensor& p : sequence->parameters()) {
    p.set_requires_grad(false);
  }
  EXPECT_TRUE(sequence->forward(x)[0].requires_grad());
  EXPECT_FALSE(
      sequence->forward({x[0].detach(), x[1].detach()})[0].requires_grad());
  EXPECT_TRUE(at::equal(state, generator.get_state()));
  EXPECT_TRUE(Sequence()->forward(x)[0].is_same(x[0]));
}

TEST_F(ReversibleSequence, OnlyParametersRequireGrad) {
  Sequence sequence = chain(kinds()[0]);
  Tensors x = streams(2);
  x = {x[0].detach(), x[1].detach()};
  const Tensors y = sequence->forward(x);
  ASSERT_TRUE(y[0].requires_grad());
  expect_close(
      gradients(loss_of(y), {}, sequence->parameters()),
      gradients(
          loss_of(formula(kinds()[0], *sequence, x)),
          {},
          sequence->parameters()));
}

struct Outside : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return x * *weight;
  }
  const at::Tensor* weight;
};

TEST_F(ReversibleSequence, RefusesWhatItCannotDo) {
  Sequence sequence = chain(kinds()[0]);
  const Tensors x = streams(2);
  const at::Tensor loss = loss_of(sequence->forward(x));
  EXPECT_THROW(
      torch::autograd::grad({loss}, x, {}, true, /*create_graph=*/true),
      c10::NotImplementedError);
  EXPECT_THROW(
      AffineCoupling(linear(), linear(), AffineCouplingOptions().clamp(0)),
      c10::ValueError);
  for (const double gamma : {0.0, 1.0}) {
    EXPECT_THROW(
        MomentumCoupling(linear(), MomentumCouplingOptions().gamma(gamma)),
        c10::ValueError);
  }
  EXPECT_THROW(
      GroupCoupling(std::vector<ModuleFunction>{linear()}), c10::ValueError);
  EXPECT_THROW(
      HalfResidual(linear(), HalfResidualOptions().n_context(0)),
      c10::ValueError);
  EXPECT_THROW(Select(std::vector<int64_t>{0, 2}), c10::ValueError);
  EXPECT_THROW(Select(std::vector<int64_t>{0, 2}, 2), c10::IndexError);
  EXPECT_THROW(Select(std::vector<int64_t>{-1, 0}), c10::IndexError);
  const auto with = [](const SequenceOptions& options) {
    return Sequence(Blocks{}, options);
  };
  EXPECT_THROW(with(SequenceOptions().exact("yes")), c10::ValueError);
  EXPECT_THROW(with(SequenceOptions().plan("auto")), c10::ValueError);
  EXPECT_THROW(with(SequenceOptions().overflow("")), c10::ValueError);
  EXPECT_THROW(with(SequenceOptions().grid_bits(53)), c10::ValueError);
  for (size_t affine_or_momentum : {1, 2}) {
    EXPECT_THROW(
        chain(kinds()[affine_or_momentum], SequenceOptions().exact("grid")),
        c10::ValueError);
  }
}

TEST_F(ReversibleSequence, RefusesWrongFunctionsAndStreams) {
  const Tensors x = streams(2, at::kFloat);
  const auto run = [&](const ModuleFunction& f, const Tensors& stack) {
    return Sequence(Blocks{HalfResidual(f)})->forward(stack);
  };
  EXPECT_THROW(run(linear(3), x), c10::ValueError);
  EXPECT_THROW(run(Masked(), x), c10::TypeError);
  EXPECT_THROW(run(linear(), {at::arange(3), at::arange(3)}), c10::TypeError);
  EXPECT_THROW(
      run(linear(), {x[0].detach().to_sparse(), x[1]}),
      c10::NotImplementedError);
  const at::Tensor weight = at::ones({}).requires_grad_();
  auto outside = std::make_shared<Outside>();
  outside->weight = &weight;
  EXPECT_THROW(run(outside, x)[0].sum().backward(), c10::Error);
  // Weights and streams may not change before the backward pass.
  nn::Linear f = linear();
  at::Tensor y = run(f, x)[0];
  {
    const at::NoGradGuard no_grad;
    f->weight.add_(1);
  }
  EXPECT_THROW(y.sum().backward(), c10::Error);
  const Tensors z = run(f, x);
  z[0].detach().add_(1);
  EXPECT_THROW(z[0].sum().backward(), c10::Error);
}

TEST_F(ReversibleSequence, DeepMomentumWarns) {
  const auto make = [](int depth, const SequenceOptions& options) {
    Blocks blocks;
    for (int i = 0; i < depth; ++i) {
      blocks.push_back(MomentumCoupling(linear()));
    }
    return Sequence(blocks, options);
  };
  struct Handler : c10::WarningHandler {
    void process(const c10::Warning& warning) override {
      messages.push_back(warning.msg());
    }
    std::vector<std::string> messages;
  } handler;
  const c10::WarningUtils::WarningHandlerGuard guard(&handler);
  make(20, {});
  make(120, SequenceOptions().exact("sidecar"));
  EXPECT_TRUE(handler.messages.empty());
  make(120, {});
  ASSERT_EQ(1u, handler.messages.size());
  EXPECT_NE(std::string::npos, handler.messages[0].find("sidecar"));
}

} // namespace
} // namespace torch_sm3::reversible
