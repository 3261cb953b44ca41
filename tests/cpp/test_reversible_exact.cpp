// SPDX-License-Identifier: Apache-2.0
#include <reversible_modules.h>

#include <torch_sm3/reversible/grid.h>
#include <torch_sm3/reversible/remember.h>

#include <limits>
#include <thread>

namespace torch_sm3::reversible {
namespace {

namespace nn = torch::nn;

constexpr int64_t kWidth = 8;

using Make = std::function<AnyBlock()>;

AnyBlock additive() {
  return AdditiveCoupling(mlp(kWidth), mlp(kWidth));
}

AnyBlock affine() {
  const auto wide = [] {
    return nn::Sequential(
        nn::LayerNorm(nn::LayerNormOptions({kWidth})),
        nn::Linear(kWidth, 2 * kWidth));
  };
  return AffineCoupling(wide(), wide());
}

AnyBlock momentum() {
  return MomentumCoupling(mlp(kWidth));
}

AnyBlock group() {
  return GroupCoupling(
      std::vector<ModuleFunction>{mlp(kWidth), mlp(kWidth), mlp(kWidth)});
}

Blocks repeated(const Make& make, int depth) {
  Blocks blocks;
  for (int i = 0; i < depth; ++i) {
    blocks.push_back(make());
  }
  return blocks;
}

// The reversible run and the store run of the same blocks.
void compare(
    const Blocks& blocks,
    const Tensors& x,
    SequenceOptions options,
    bool equal = true) {
  Sequence sequence(blocks, options);
  Sequence store(blocks, options.plan("store"));
  sequence->to(x[0].scalar_type());
  const Tensors got = sequence->forward(x), want = store->forward(x);
  expect_equal(got, want);
  const auto a = gradients(loss_of(got), x, sequence->parameters());
  const auto b = gradients(loss_of(want), x, sequence->parameters());
  bool same = true;
  for (size_t i = 0; i < a.size(); ++i) {
    same = same && at::equal(a[i], b[i]);
  }
  EXPECT_EQ(equal, same);
}

class ReversibleExact : public testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(0);
  }
};

TEST_F(ReversibleExact, GridEqualsTheStoreRunAtDepth128) {
  const auto grid = SequenceOptions().exact("grid");
  const auto x = streams(2, at::kFloat, {4, kWidth});
  compare(repeated(additive, 128), x, grid);
  compare(repeated(group, 5), streams(3, at::kFloat, {4, kWidth}), grid);
  compare(
      repeated([] { return HalfResidual(mlp(kWidth)); }, 3),
      streams(2, at::kDouble, {4, kWidth}),
      SequenceOptions().exact("grid").grid_bits(40));
}

TEST_F(ReversibleExact, SidecarEqualsTheStoreRunAtDepth128) {
  const auto sidecar = SequenceOptions().exact("sidecar");
  const auto x = streams(2, at::kFloat, {4, kWidth});
  compare(repeated(additive, 128), x, sidecar);
  compare(repeated(affine, 128), x, sidecar);
  compare(repeated(momentum, 128), x, sidecar);
  compare(repeated(affine, 6), streams(2, at::kBFloat16, {4, kWidth}), sidecar);
  compare(repeated(group, 6), streams(3, at::kHalf, {4, kWidth}), sidecar);
}

TEST_F(ReversibleExact, WithoutAnExactModeBitsDiffer) {
  const auto x = streams(2, at::kFloat, {4, kWidth});
  compare(repeated(additive, 64), x, {}, /*equal=*/false);
}

TEST_F(ReversibleExact, TheInverseOnTheGridIsExact) {
  Sequence sequence(
      repeated(additive, 64), SequenceOptions().exact("grid").grid_bits(12));
  const auto x = streams(2, at::kFloat, {4, kWidth});
  const at::NoGradGuard no_grad;
  Tensors rounded{reversible_quantize(x[0], 12), reversible_quantize(x[1], 12)};
  expect_equal(sequence->inverse(sequence->forward(x)), rounded);
}

TEST_F(ReversibleExact, OnlyStreamsThatChangeAreRounded) {
  Sequence sequence(
      Blocks{HalfResidual(mlp(kWidth))},
      SequenceOptions().exact("grid").grid_bits(2));
  const auto x = streams(2, at::kFloat, {4, kWidth});
  const auto y = sequence->forward(x);
  EXPECT_TRUE(y[1].is_same(x[1]));
  EXPECT_TRUE(at::equal(y[0], reversible_quantize(y[0], 2)));
}

// The node of an early half runs before that of a later one, which then finds
// the streams too far back: its gradient comes to it over nodes of another
// thread, whose numbers are low, and autograd runs high numbers first.
TEST_F(ReversibleExact, ANodeThatFindsTheCursorTooFarBack) {
  for (const char* exact : {"none", "grid", "sidecar"}) {
    SCOPED_TRACE(exact);
    Blocks blocks;
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(AnyBlock(HalfResidual(mlp(kWidth))));
      blocks.push_back(AnyBlock(Select(std::vector<int64_t>{2, 3, 0, 1})));
    }
    Sequence sequence(blocks, SequenceOptions().exact(exact));
    const auto x = streams(4, at::kFloat, {4, kWidth});
    const auto run = [&](bool out_of_order) {
      const auto y = sequence->forward(x);
      at::Tensor late;
      const auto work = [&] { late = y[2].sin().sum(); };
      if (out_of_order) {
        std::thread(work).join();
      } else {
        work();
      }
      return gradients(late + (y[0] * y[0]).sum(), x, sequence->parameters());
    };
    const auto want = run(false), got = run(true);
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(want[i].defined(), got[i].defined());
      if (!want[i].defined()) {
        continue;
      }
      const bool same = at::equal(want[i], got[i]);
      EXPECT_TRUE(
          same ||
          (exact[0] == 'n' && at::allclose(want[i], got[i], 1e-4, 1e-5)));
    }
  }
}

struct BigImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return x.sin() * weight;
  }
  at::Tensor weight =
      register_parameter("weight", at::full({1}, 1e9, at::kFloat));
};
TORCH_MODULE(Big);

TEST_F(ReversibleExact, AnOverflowKeepsTheInput) {
  for (const char* exact : {"grid", "sidecar"}) {
    SCOPED_TRACE(exact);
    const Blocks blocks{additive(), HalfResidual(Big()), Swap(), additive()};
    const auto x = streams(2, at::kFloat, {64, kWidth});
    compare(blocks, x, SequenceOptions().exact(exact));
    Sequence sequence(blocks, SequenceOptions().exact(exact));
    loss_of(sequence->forward(x)).backward();
    EXPECT_GE(sequence->kept(), 1);
    Sequence strict(blocks, SequenceOptions().exact(exact).overflow("raise"));
    EXPECT_THROW(strict->forward(x), c10::ValueError);
    const at::NoGradGuard no_grad;
    strict->forward(x);
  }
}

// As kernels that are chosen by whether there will be a backward pass.
struct GradModeImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const double factor = at::GradMode::is_enabled() ? 1.0 : 1.001;
    return x.tanh() * weight * factor;
  }
  at::Tensor weight = register_parameter("weight", at::ones({kWidth}));
};
TORCH_MODULE(GradMode);

TEST_F(ReversibleExact, AFunctionWhoseBitsDependOnGradMode) {
  const Blocks blocks =
      repeated([] { return AdditiveCoupling(GradMode(), GradMode()); }, 4);
  const auto x = streams(2, at::kFloat, {4, kWidth});
  for (const char* exact : {"grid", "sidecar"}) {
    SCOPED_TRACE(exact);
    // The first call finds it out.
    for (int call = 0; call < 2; ++call) {
      compare(blocks, x, SequenceOptions().exact(exact));
    }
  }
  // A pass that needs one weight moves over the other halves without a VJP.
  std::vector<Tensors> grads;
  for (const char* plan : {"reversible", "store"}) {
    Sequence sequence(blocks, SequenceOptions().exact("grid").plan(plan));
    grads.push_back(gradients(
        loss_of(sequence->forward(x)), {}, {sequence->parameters()[0]}));
  }
  expect_equal(grads[0], grads[1]);
}

TEST_F(ReversibleExact, NonFiniteNumbersAreRebuilt) {
  for (const char* exact : {"grid", "sidecar"}) {
    SCOPED_TRACE(exact);
    const Blocks blocks = repeated(additive, 2);
    Tensors x = streams(2, at::kFloat, {4, kWidth});
    {
      const at::NoGradGuard no_grad;
      x[0][0][0] = std::numeric_limits<float>::infinity();
      x[1][1][1] = std::numeric_limits<float>::quiet_NaN();
    }
    std::vector<Tensors> grads;
    for (const char* plan : {"reversible", "store"}) {
      Sequence sequence(blocks, SequenceOptions().exact(exact).plan(plan));
      grads.push_back(
          gradients(loss_of(sequence->forward(x)), x, sequence->parameters()));
      for (at::Tensor& grad : grads.back()) {
        grad = grad.nan_to_num(7.0);
      }
    }
    expect_equal(grads[0], grads[1]);
  }
}

TEST_F(ReversibleExact, RefusesOtherStreams) {
  const auto run = [](const char* exact, at::ScalarType type) {
    Sequence sequence(repeated(additive, 1), SequenceOptions().exact(exact));
    return sequence->forward(streams(2, type, {4, kWidth}));
  };
  EXPECT_THROW(run("grid", at::kHalf), c10::TypeError);
  EXPECT_THROW(run("sidecar", at::kComplexFloat), c10::TypeError);
  const auto x = streams(2, at::kBFloat16, {4, kWidth});
  Sequence low(repeated(additive, 5)),
      drifting(repeated(additive, 5), SequenceOptions().allow_drift(true));
  low->to(at::kBFloat16);
  drifting->to(at::kBFloat16);
  EXPECT_THROW(low->forward(x), c10::ValueError);
  drifting->forward(x);
}

// --- remembered choices ----------------------------------------------------

struct RouterImpl : nn::Module {
  RouterImpl()
      : score(register_module(
            "score",
            nn::Linear(nn::LinearOptions(kWidth, 10).bias(false)))),
        experts(register_parameter("experts", at::randn({10, kWidth}) / 3)) {}
  at::Tensor forward(const at::Tensor& x) {
    // Far from zero, so that rounding in x decides.
    const at::Tensor scores = score->forward(x) + 1e6;
    const at::Tensor best = remember(std::get<1>(scores.topk(2)), "best");
    const at::Tensor keep = remember(x > 0);
    const at::Tensor mixed =
        (experts.index({best}) * scores.gather(1, best).unsqueeze(2)).sum(1);
    return at::where(keep, mixed * 1e-6, x);
  }
  nn::Linear score;
  at::Tensor experts;
};
TORCH_MODULE(Router);

TEST_F(ReversibleExact, ChoicesAreRemembered) {
  const Blocks blocks =
      repeated([] { return AdditiveCoupling(Router(), Router()); }, 6);
  Sequence sequence(blocks);
  Sequence store(blocks, SequenceOptions().plan("store"));
  const auto x = streams(2, at::kFloat, {32, kWidth});
  const auto a =
      gradients(loss_of(sequence->forward(x)), x, sequence->parameters());
  const auto b =
      gradients(loss_of(store->forward(x)), x, sequence->parameters());
  for (size_t i = 0; i < a.size(); ++i) {
    const double scale = b[i].abs().max().item<double>();
    EXPECT_LT((a[i] - b[i]).abs().max().item<double>(), 1e-3 * scale) << i;
  }
}

// --- memory ----------------------------------------------------------------

int64_t kept_bytes(int depth, const SequenceOptions& options) {
  Sequence sequence(repeated(additive, depth), options);
  const auto x = streams(2, at::kFloat, {256, kWidth});
  sequence->forward(x); // what is learned in the first call
  Tensors y;
  return live_after([&](MemoryMeter&) { y = sequence->forward(x); });
}

TEST_F(ReversibleExact, MemoryDoesNotGrowWithDepth) {
  // The outputs are the saved streams.
  const int64_t stream = 256 * kWidth * 4;
  for (const char* exact : {"none", "grid"}) {
    SCOPED_TRACE(exact);
    const auto options = SequenceOptions().exact(exact);
    EXPECT_EQ(2 * stream, kept_bytes(2, options));
    EXPECT_EQ(2 * stream, kept_bytes(16, options));
  }
  const auto sidecar = SequenceOptions().exact("sidecar");
  const int64_t slope = kept_bytes(17, sidecar) - kept_bytes(1, sidecar);
  EXPECT_LT(slope * 8, 16 * 2 * 4.0 * 256 * kWidth);
  EXPECT_GT(kept_bytes(16, SequenceOptions().plan("store")), 32 * stream);
}

// The most that one step needs, for the gradients of the inputs.
int64_t peak_bytes(int depth, const SequenceOptions& options) {
  Sequence sequence(repeated(additive, depth), options);
  for (const at::Tensor& p : sequence->parameters()) {
    p.set_requires_grad(false);
  }
  const auto x = streams(2, at::kFloat, {256, kWidth});
  const auto step = [&] {
    const Tensors y = sequence->forward(x);
    torch::autograd::grad({y[0], y[1]}, x, {x[0].detach(), x[1].detach()});
  };
  step();
  int64_t peak = 0;
  live_after([&](MemoryMeter& meter) {
    step();
    peak = meter.peak;
  });
  return peak;
}

TEST_F(ReversibleExact, ThePeakOfAStepDoesNotGrowWithDepth) {
  for (const char* exact : {"none", "grid"}) {
    SCOPED_TRACE(exact);
    const auto options = SequenceOptions().exact(exact);
    EXPECT_EQ(peak_bytes(3, options), peak_bytes(24, options));
  }
  const auto store = SequenceOptions().plan("store");
  EXPECT_LT(4 * peak_bytes(3, store), peak_bytes(24, store));
}

struct ThrowingImpl : nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    TORCH_CHECK(!throws, "an error inside F");
    return x.tanh() * weight;
  }
  at::Tensor weight = register_parameter("weight", at::ones({1}));
  bool throws = false;
};
TORCH_MODULE(Throwing);

TEST_F(ReversibleExact, NothingLeaks) {
  for (const char* exact : {"none", "grid", "sidecar"}) {
    SCOPED_TRACE(exact);
    Throwing f;
    Sequence sequence(
        Blocks{additive(), AdditiveCoupling(Router(), f), additive()},
        SequenceOptions().exact(exact));
    const auto x = streams(2, at::kFloat, {16, kWidth});
    const auto step = [&] {
      gradients(loss_of(sequence->forward(x)), x, sequence->parameters());
    };
    step();
    EXPECT_EQ(0, live_after([&](MemoryMeter& meter) {
                for (int i = 0; i < 20; ++i) {
                  step();
                  EXPECT_EQ(0, meter.live);
                }
                sequence->forward(x); // without a backward pass
                EXPECT_EQ(0, meter.live);
                sequence->forward(x)[1].sum().backward();
                sequence->zero_grad();
                x[0].mutable_grad().reset();
                x[1].mutable_grad().reset();
                EXPECT_EQ(0, meter.live);
                {
                  const at::Tensor loss = loss_of(sequence->forward(x));
                  f->throws = true;
                  EXPECT_THROW(loss.backward(), c10::Error);
                  EXPECT_THROW(sequence->forward(x), c10::Error);
                  f->throws = false;
                }
                sequence->zero_grad(); // of the blocks before the error
              }));
  }
}

} // namespace
} // namespace torch_sm3::reversible
