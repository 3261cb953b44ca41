// SPDX-License-Identifier: Apache-2.0
#include <reversible_kinds.h>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/serialize.h>

#include <sstream>

namespace torch_sm3::reversible {
namespace {

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
    for (const Sequence& s : {sequence, other}) {
      const auto grads = gradients(loss_of(s->forward(x)), {}, s->parameters());
      const at::NoGradGuard no_grad;
      size_t i = 0;
      for (const at::Tensor& p : s->parameters()) {
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
    for (const at::Tensor& p : copy->parameters()) {
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

} // namespace
} // namespace torch_sm3::reversible
