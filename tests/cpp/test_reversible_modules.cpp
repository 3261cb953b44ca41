// SPDX-License-Identifier: Apache-2.0
#include <reversible_modules.h>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/serialize.h>

#include <cmath>
#include <sstream>
#include <thread>

namespace torch_sm3::reversible {
namespace {

namespace nn = torch::nn;

constexpr int64_t kWidth = 6;

at::Tensor
run(const torch::nn::Module& block, const char* name, const at::Tensor& x) {
  const auto child = block.named_children()[name];
  const auto linear = std::dynamic_pointer_cast<nn::LinearImpl>(child);
  return linear->forward(x);
}

// One kind of block, and its formula in plain operators.
struct Kind {
  const char* name;
  size_t streams;
  std::function<AnyBlock()> make;
  std::function<Tensors(const Block&, const Tensors&)> formula;
};

Tensors additive(const Block& block, const Tensors& x) {
  const at::Tensor y1 = x[0] + run(block, "F", x[1]);
  return {y1, x[1] + run(block, "G", y1)};
}

at::Tensor affine_half(const at::Tensor& acc, const at::Tensor& both) {
  const at::Tensor r = both.slice(-1, 0, kWidth), t = both.slice(-1, kWidth);
  return acc * (1.5 * at::tanh(r / 1.5)).exp() + t;
}

Tensors affine(const Block& block, const Tensors& x) {
  const at::Tensor y1 = affine_half(x[0], run(block, "F", x[1]));
  return {y1, affine_half(x[1], run(block, "G", y1))};
}

Tensors momentum(const Block& block, const Tensors& x) {
  const at::Tensor v = 0.8 * x[1] + (1 - 0.8) * run(block, "F", x[0]);
  return {x[0] + v, v};
}

Tensors group(const Block& block, const Tensors& x) {
  const nn::Module& fs = *block.named_children()["Fs"];
  const at::Tensor y0 = x[0] + run(fs, "0", x[1] + x[2]);
  const at::Tensor y1 = x[1] + run(fs, "1", y0);
  return {y0, y1, x[2] + run(fs, "2", y1)};
}

Tensors half(const Block& block, const Tensors& x) {
  const nn::Module& layers = *block.named_children()["layers"];
  return {x[0] + run(layers, "0", x[1]), x[1]};
}

nn::Linear linear(int64_t out = kWidth) {
  return nn::Linear(kWidth, out);
}

std::vector<Kind> kinds() {
  return {
      {"additive",
       2,
       [] { return AdditiveCoupling(linear(), linear()); },
       additive},
      {"affine",
       2,
       [] {
         return AffineCoupling(
             linear(2 * kWidth),
             linear(2 * kWidth),
             AffineCouplingOptions().clamp(1.5));
       },
       affine},
      {"momentum",
       2,
       [] {
         return MomentumCoupling(
             linear(), MomentumCouplingOptions().gamma(0.8));
       },
       momentum},
      {"group",
       3,
       [] {
         return GroupCoupling(
             std::vector<ModuleFunction>{linear(), linear(), linear()});
       },
       group},
      {"half", 2, [] { return HalfResidual(linear()); }, half},
      {"swap",
       2,
       [] { return Swap(); },
       [](const Block& /*block*/, const Tensors& x) {
         return Tensors{x[1], x[0]};
       }},
  };
}

// Blocks of one kind, swapped in between so that every stream is changed.
Sequence chain(const Kind& kind, const SequenceOptions& options = {}) {
  Blocks blocks;
  for (int i = 0; i < 3; ++i) {
    blocks.push_back(kind.make());
    blocks.push_back(Swap());
  }
  Sequence sequence(blocks, options);
  sequence->to(at::kDouble);
  return sequence;
}

Tensors formula(const Kind& kind, const SequenceImpl& sequence, Tensors x) {
  for (size_t i = 0; i < sequence.size(); i += 2) {
    x = kind.formula(*sequence[i], x);
    std::swap(x[0], x[1]);
  }
  return x;
}

class ReversibleModules : public testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(0);
  }
};

TEST_F(ReversibleModules, EveryBlockEqualsItsFormula) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    Sequence sequence = chain(kind);
    const Tensors x = streams(kind.streams);
    const Tensors got = sequence->forward(x);
    const Tensors want = formula(kind, *sequence, x);
    expect_close(got, want, 1e-12);
    expect_close(
        gradients(loss_of(got), x, sequence->parameters()),
        gradients(loss_of(want), x, sequence->parameters()));
    Sequence store =
        Sequence(Blocks{sequence.ptr()}, SequenceOptions().plan("store"));
    expect_equal(store->forward(x), got);
    expect_close(
        gradients(loss_of(store->forward(x)), x, sequence->parameters()),
        gradients(
            loss_of(formula(kind, *sequence, x)), x, sequence->parameters()));
  }
}

TEST_F(ReversibleModules, InverseGivesTheInputsBack) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    Sequence sequence = chain(kind);
    const Tensors x = streams(kind.streams);
    expect_close(sequence->inverse(sequence->forward(x)), x, 1e-10);
    const auto block = (*sequence)[0];
    expect_close(block->inverse(block->forward(x)), x, 1e-10);
    // Both are ordinary differentiable code.
    EXPECT_EQ(block->forward(x)[0].requires_grad(), true);
    const Tensors round = block->inverse(block->forward(x));
    Tensors ones;
    for (const at::Tensor& g : gradients(round[0].sum(), {x[0]}, {})) {
      ones.push_back(g - 1);
    }
    expect_close(ones, {at::zeros_like(x[0])});
  }
}

TEST_F(ReversibleModules, TheStackRule) {
  Sequence sequence(
      Blocks{
          Select(std::vector<int64_t>{0, 1, 0}),
          AdditiveCoupling(linear(), linear()),
          HalfResidual(linear())});
  sequence->to(at::kDouble);
  EXPECT_EQ(2u, sequence->n_in());
  EXPECT_EQ(3u, sequence->n_out());
  const Tensors x = streams(2);
  const at::Tensor deep = at::arange(3);
  const Tensors y = sequence->forward({x[0], x[1], deep});
  ASSERT_EQ(4u, y.size());
  // The duplicate is the old first stream, the deep item untouched.
  EXPECT_TRUE(at::equal(y[2], x[0]) && y[3].is_same(deep));
  const auto block = (*sequence)[1], last = (*sequence)[2];
  Tensors z = additive(*block, x);
  z = half(*last, z);
  z.push_back(x[0]);
  const Tensors all{y[0], y[1], y[2]};
  expect_close(
      gradients(loss_of(all), x, sequence->parameters()),
      gradients(loss_of(z), x, sequence->parameters()));
  EXPECT_THROW(sequence->forward({x[0]}), c10::TypeError);
}

struct MaskedImpl : nn::Module {
  MaskedImpl() : linear(register_module("linear", nn::Linear(6, 6))) {}
  at::Tensor forward(const at::Tensor& x, at::Tensor memory, at::Tensor mask) {
    const at::Tensor y = linear->forward(x) + memory.mean(0);
    return mask.defined() ? y.masked_fill(mask, 0.0) : y;
  }
  nn::Linear linear;
};
TORCH_MODULE(Masked);

TEST_F(ReversibleModules, SideTensors) {
  Masked f, g;
  Sequence sequence(
      Blocks{
          HalfResidual(f, HalfResidualOptions().side({1, 0})),
          Swap(),
          HalfResidual(g, HalfResidualOptions().side({1, 0}))});
  sequence->to(at::kDouble);
  const Tensors x = streams(2), leaves = streams(2);
  for (const at::Tensor& mask : {at::rand({4, 6}).lt(0.5), at::Tensor()}) {
    const at::Tensor memory = leaves[0] * leaves[1];
    Tensors inputs{x[0], x[1], leaves[0], leaves[1]};
    const Tensors y = sequence->forward(x, {mask, memory});
    const auto got = gradients(loss_of(y), inputs, sequence->parameters());
    const at::Tensor plain = leaves[0] * leaves[1];
    const at::Tensor a = x[0] + f->forward(x[1], plain, mask);
    const at::Tensor b = x[1] + g->forward(a, plain, mask);
    expect_close(
        got, gradients(loss_of({b, a}), inputs, sequence->parameters()));
  }
  EXPECT_THROW(sequence->forward(x, {leaves[0]}), c10::TypeError);
}

TEST_F(ReversibleModules, ReplaysDropoutFlagsAndBatchNorm) {
  nn::Sequential f(
      nn::Linear(kWidth, kWidth), nn::BatchNorm1d(kWidth), nn::Dropout(0.5));
  Sequence sequence(Blocks{AdditiveCoupling(f, linear())});
  sequence->to(at::kDouble);
  const auto twin = std::dynamic_pointer_cast<SequenceImpl>(sequence->clone());
  const Tensors x = streams(2);
  at::manual_seed(7);
  const at::Tensor loss = loss_of(sequence->forward(x));
  sequence->eval();
  const auto got = gradients(loss, x, sequence->parameters());
  EXPECT_FALSE(f->is_training() || f[2]->is_training());
  const at::Tensor draw = at::rand({3});
  at::manual_seed(7);
  const auto block = (*twin)[0];
  expect_close(
      got, gradients(loss_of(block->forward(x)), x, twin->parameters()));
  EXPECT_TRUE(at::equal(draw, at::rand({3})));
  const Tensors mine = sequence->buffers(), theirs = twin->buffers();
  expect_equal(mine, theirs);
  EXPECT_EQ(1, mine[2].item<int64_t>()); // batches that were counted
}

TEST_F(ReversibleModules, SaveLoadAndTrainOnWithEqualBits) {
  Sequence sequence = chain(kinds()[0]), other = chain(kinds()[0]);
  std::stringstream file;
  torch::save(sequence, file);
  torch::load(other, file);
  EXPECT_TRUE(sequence->named_parameters().contains("blocks.0.F.weight"));
  const Tensors x = streams(2);
  for (int step = 0; step < 3; ++step) {
    for (Sequence s : {sequence, other}) {
      const auto grads = gradients(loss_of(s->forward(x)), {}, s->parameters());
      const at::NoGradGuard no_grad;
      size_t i = 0;
      for (at::Tensor p : s->parameters()) {
        p.sub_(grads[i++], 0.01);
      }
    }
  }
  expect_equal(sequence->parameters(), other->parameters());
}

struct OuterImpl : nn::Cloneable<OuterImpl> {
  OuterImpl() {
    OuterImpl::reset();
  }
  void reset() override {
    sequence = register_module("sequence", chain(kinds()[0]));
  }
  Sequence sequence = nullptr;
};

TEST_F(ReversibleModules, ClonesAreDeep) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    Sequence sequence = chain(kind);
    const auto copy =
        std::dynamic_pointer_cast<SequenceImpl>(sequence->clone());
    const Tensors x = streams(kind.streams);
    expect_equal(copy->forward(x), sequence->forward(x));
    const at::NoGradGuard no_grad;
    const Tensors before = sequence->forward(x);
    for (at::Tensor p : copy->parameters()) {
      p.zero_();
    }
    expect_equal(sequence->forward(x), before);
  }
  const OuterImpl outer;
  const auto copy = std::dynamic_pointer_cast<OuterImpl>(outer.clone());
  const Tensors x = streams(2);
  expect_equal(copy->sequence->forward(x), outer.sequence->forward(x));
  expect_equal(copy->sequence->parameters(), copy->parameters());
}

TEST_F(ReversibleModules, TwoThreadsTrainOneSequence) {
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

TEST_F(ReversibleModules, HooksFireOnceAlsoOfTiedParameters) {
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

TEST_F(ReversibleModules, SeekAndRestart) {
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

TEST_F(ReversibleModules, ABlockThatTheLossDoesNotReach) {
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

TEST_F(ReversibleModules, ASequenceInsideF) {
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

TEST_F(ReversibleModules, WithoutGradItIsABareLoop) {
  Sequence sequence = chain(kinds()[0]);
  const Tensors x = streams(2);
  const at::Generator generator = at::detail::getDefaultCPUGenerator();
  const at::Tensor state = generator.get_state();
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(sequence->forward(x)[0].requires_grad());
  }
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(sequence->forward(x)[0].is_inference());
  }
  for (at::Tensor p : sequence->parameters()) {
    p.set_requires_grad(false);
  }
  EXPECT_TRUE(sequence->forward(x)[0].requires_grad());
  EXPECT_FALSE(
      sequence->forward({x[0].detach(), x[1].detach()})[0].requires_grad());
  EXPECT_TRUE(at::equal(state, generator.get_state()));
  EXPECT_TRUE(Sequence()->forward(x)[0].is_same(x[0]));
}

TEST_F(ReversibleModules, OnlyParametersRequireGrad) {
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

TEST_F(ReversibleModules, RefusesWhatItCannotDo) {
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

TEST_F(ReversibleModules, RefusesWrongFunctionsAndStreams) {
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

TEST_F(ReversibleModules, DeepMomentumWarns) {
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
