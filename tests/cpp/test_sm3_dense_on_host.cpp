// SPDX-License-Identifier: Apache-2.0
// The dense CUDA kernels of SM3 on the host: they have the bits of the CPU's.
#include <cuda_on_host.h>
#include <sm3_on_host.h>

#include <limits>

namespace torch_sm3::testing {
namespace {

using Specs = std::vector<Spec>;

Choice choose(const std::function<void(SM3UpdateOptions&)>& set) {
  Choice choice;
  set(choice.options);
  return choice;
}

Choice with_momentum(double momentum = 0.9) {
  return choose([&](auto& o) { o.momentum = momentum; });
}

// One call with many shapes: more than one tile of rows and of columns, ranks
// 0 to 5, sizes of 0 and 1, lengths that are no multiple of anything.
Specs many_shapes(at::ScalarType dtype = at::kFloat) {
  Specs specs;
  for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{
           {70, 300},
           {300, 20},
           {},
           {5},
           {2100},
           {2, 2},
           {1, 9},
           {0, 3},
           {24, 6, 3, 3},
           {3, 5, 7},
           {2, 3, 2, 4, 3},
           {3, 2, 320}}) {
    specs.push_back({.shape = shape, .dtype = dtype});
  }
  return specs;
}

TEST(SM3CudaDense, ManyShapesInOneCallHaveTheBitsOfTheCpu) {
  compare(many_shapes(), {});
  compare(many_shapes(), with_momentum());
}

TEST(SM3CudaDense, EveryVariantAndPresetHasTheBitsOfTheCpu) {
  for (const char* variant : {"II", "I", "given"}) {
    for (const char* compat : {"", "google", "optax", "trax", "enealor"}) {
      for (const double beta2 : {1.0, 0.9}) {
        if (compat == std::string("trax") && beta2 < 1) {
          continue;
        }
        SCOPED_TRACE(c10::str(variant, " ", compat, " ", beta2));
        const Choice choice = choose([&](auto& o) {
          o.variant = variant;
          o.compat = compat;
          o.beta2 = beta2;
          o.momentum = 0.9;
          o.weight_decay = 0.01;
        });
        compare(
            {{.shape = {70, 300}}, {.shape = {300}}, {.shape = {2, 2}}},
            choice);
      }
    }
  }
}

TEST(SM3CudaDense, HyperparametersHaveTheBitsOfTheCpu) {
  const Specs specs{{.shape = {9, 40}}, {.shape = {33}}};
  compare(specs, choose([](auto& o) { o.eps = 0.0; }));
  compare(specs, choose([](auto& o) { o.eps = 1e-3; }));
  compare(specs, choose([](auto& o) { o.maximize = true; }));
  compare(specs, choose([](auto& o) { o.weight_decay = 0.1; }));
  compare(specs, choose([](auto& o) {
            o.grad_scale = at::scalar_tensor(3.0, at::kFloat);
            o.maximize = true;
          }));
  compare(specs, choose([](auto& o) {
            o.grad_scale = at::scalar_tensor(7.0, at::kHalf);
          }));
}

TEST(SM3CudaDense, EveryPairOfTypesHasTheBitsOfTheCpu) {
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
    for (const auto grad :
         {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
      if (grad == at::kDouble && dtype != at::kDouble) {
        continue;
      }
      SCOPED_TRACE(c10::str(dtype, " ", grad));
      const Specs specs{
          {.shape = {9, 264}, .dtype = dtype, .grad_dtype = grad},
          {.shape = {9, 33}, .dtype = dtype, .grad_dtype = grad},
          {.shape = {40}, .dtype = dtype, .grad_dtype = grad},
          {.shape = {41}, .dtype = dtype, .grad_dtype = grad}};
      compare(specs, with_momentum());
      compare(specs, choose([](auto& o) { o.variant = "I"; }));
    }
  }
}

TEST(SM3CudaDense, EveryTypeOfMomentumHasTheBitsOfTheCpu) {
  for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
    for (const auto momentum : {at::kFloat, at::kBFloat16, at::kChar}) {
      SCOPED_TRACE(c10::str(dtype, " ", momentum));
      Specs specs = many_shapes(dtype);
      for (Spec& spec : specs) {
        spec.momentum_dtype = momentum;
      }
      compare(specs, with_momentum());
    }
  }
  compare(
      {{.shape = {9, 40}, .dtype = at::kDouble, .momentum_dtype = at::kFloat}},
      with_momentum());
}

TEST(SM3CudaDense, Int8BlocksOfAnySizeHaveTheBitsOfTheCpu) {
  for (const bool stochastic : {false, true}) {
    for (const int64_t last : {1, 3, 100, 128, 255, 256, 257, 300, 512, 700}) {
      SCOPED_TRACE(last);
      const Choice choice = choose([&](auto& o) {
        o.momentum = 0.9;
        o.stochastic_rounding = stochastic;
        o.seed = 5;
      });
      compare(
          {{.shape = {20, last}, .momentum_dtype = at::kChar},
           {.shape = {last}, .momentum_dtype = at::kChar},
           {.shape = {2, 40, last}, .momentum_dtype = at::kChar}},
          choice);
    }
  }
}

TEST(SM3CudaDense, KahanHasTheBitsOfTheCpu) {
  for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    for (const char* compat : {"", "trax"}) {
      Choice choice = choose([&](auto& o) {
        o.weight_decay = 0.01;
        o.momentum = 0.9;
        o.compat = compat;
      });
      choice.kahan = true;
      compare(many_shapes(dtype), choice);
    }
  }
}

TEST(SM3CudaDense, StochasticRoundingHasTheBitsOfTheCpu) {
  const Choice choice = choose([](auto& o) {
    o.stochastic_rounding = true;
    o.seed = 1234567;
  });
  compare(many_shapes(at::kBFloat16), choice);
  Choice placed = choice;
  placed.options.global_index = {7, 1000, 90, 2};
  compare({{.shape = {40, 33}, .dtype = at::kBFloat16}}, placed);
}

TEST(SM3CudaDense, StridesHaveTheBitsOfTheCpu) {
  for (const auto momentum : {at::kFloat, at::kChar}) {
    compare(
        {{.shape = {70, 300}, .momentum_dtype = momentum, .transposed = true},
         {.shape = {24, 6, 3, 3},
          .momentum_dtype = momentum,
          .transposed = true},
         {.shape = {2, 2}, .momentum_dtype = momentum, .transposed = true}},
        with_momentum());
  }
}

TEST(SM3CudaDense, StridedParametersHaveTheBitsOfTheCpu) {
  const auto strided = [](const at::Tensor& storage,
                          at::IntArrayRef sizes,
                          at::IntArrayRef strides,
                          int64_t offset) {
    return storage.as_strided(sizes, strides, offset);
  };
  Problem cpu =
      make({{.shape = {40, 33}}, {.shape = {40, 64}}, {.shape = {100}}}, {});
  Problem cuda = cpu.clone();
  for (Problem* p : {&cpu, &cuda}) {
    at::Tensor storage = at::zeros({20000}, at::kFloat);
    const std::vector<at::Tensor> places{
        strided(storage, {40, 33}, {1, 50}, 3),
        strided(storage, {40, 64}, {70, 1}, 5001),
        strided(storage, {100}, {3}, 10001)};
    for (size_t i = 0; i < places.size(); ++i) {
      places[i].copy_(p->params[i]);
      p->params[i] = places[i];
    }
  }
  run_cpu(cpu, {});
  run_on_host(cuda, {});
  expect_same(cpu, cuda);
}

TEST(SM3CudaDense, EveryCoverHasTheBitsOfTheCpu) {
  struct Case {
    std::vector<int64_t> shape;
    std::vector<int64_t> cover;
  };
  const std::vector<Case> cases{
      {{24, 20}, {2, 24, 20, 1, 3}},             // diagonal
      {{24, 20}, {2, 24, 20, 2, 3, 1}},          // of full size, and of rows
      {{24, 20}, {2, 24, 20, 2, 3, 2}},          // of full size, and of columns
      {{24, 20}, {2, 24, 20, 1, 0}},             // one number
      {{24, 20}, {2, 24, 20, 1, 2}},             // columns alone
      {{24, 20}, {2, 24, 20, 1, 1}},             // rows alone
      {{24, 20}, {3, 4, 6, 20, 2, 3, 5}},        // heads
      {{24, 320}, {3, 4, 6, 320, 2, 3, 5}},      // heads, longer
      {{20, 24}, {3, 20, 4, 6, 2, 3, 6}},        // heads of the last dimension
      {{20, 64}, {3, 20, 4, 16, 3, 1, 3, 6}},    // blocks and rows
      {{6, 4, 3, 3}, {3, 6, 4, 9, 3, 1, 2, 4}},  // merged
      {{6, 4, 3, 3}, {4, 6, 4, 3, 3, 2, 3, 12}}, // two groups
      {{480}, {3, 4, 6, 20, 3, 1, 2, 4}},        // a view of a vector
      {{480}, {7, 2, 2, 2, 3, 2, 2, 5, 7, 1, 2, 4, 8, 16, 32, 64}},
      {{24, 20}, {3, 16, 10, 3, 3, 1, 2, 4}}, // across the dimensions
  };
  for (const Case& c : cases) {
    for (const char* variant : {"II", "I", "given"}) {
      for (const auto momentum : {at::kFloat, at::kChar}) {
        SCOPED_TRACE(
            c10::str(at::IntArrayRef(c.cover), " ", variant, " ", momentum));
        const Choice choice = choose([&](auto& o) {
          o.covers = c.cover;
          o.variant = variant;
          o.momentum = 0.9;
          o.beta2 = 0.9;
        });
        compare({{.shape = c.shape, .momentum_dtype = momentum}}, choice);
      }
    }
  }
}

TEST(SM3CudaDense, PartsOfAFlatTensorHaveTheBitsOfTheCpu) {
  struct Part {
    int64_t start, count;
  };
  for (const Part part :
       {Part{0, 600}, {130, 0}, {130, 1}, {130, 4000}, {3999, 2001}}) {
    for (const std::vector<int64_t>& cover :
         {std::vector<int64_t>{2, 20, 300, 2, 1, 2},
          std::vector<int64_t>{2, 20, 300, 1, 3},
          std::vector<int64_t>{3, 20, 30, 10, 2, 3, 6}}) {
      for (const char* variant : {"II", "I", "given"}) {
        SCOPED_TRACE(
            c10::str(part.start, " ", at::IntArrayRef(cover), " ", variant));
        const Choice choice = choose([&](auto& o) {
          o.beta2 = 0.9;
          o.compat = part.start == 0 ? "enealor" : "";
          o.covers = cover;
          o.global_index = {0, part.start, 1};
          o.variant = variant;
          o.stochastic_rounding = true;
        });
        compare({{.shape = {part.count}, .dtype = at::kBFloat16}}, choice);
      }
    }
  }
}

TEST(SM3CudaDense, NonFiniteAndHugeGradientsHaveTheBitsOfTheCpu) {
  for (const auto momentum : {at::kFloat, at::kChar}) {
    const Choice choice = with_momentum();
    Problem cpu = make(
        {{.shape = {70, 300}, .momentum_dtype = momentum},
         {.shape = {300}, .momentum_dtype = momentum}},
        choice);
    cpu.grads[0][1][2] = std::numeric_limits<float>::infinity();
    cpu.grads[0][3][4] = 1e30f;
    cpu.grads[0][66][299] = std::numeric_limits<float>::quiet_NaN();
    cpu.grads[1][7] = -std::numeric_limits<float>::infinity();
    const Problem cuda = cpu.clone();
    run_cpu(cpu, choice);
    run_on_host(cuda, choice);
    expect_same(cpu, cuda);
    EXPECT_EQ(cpu.params[0].isnan().sum().item<int64_t>(), 2);
    for (const at::Tensor& accumulator : cuda.accumulators) {
      EXPECT_TRUE(accumulator.isfinite().all().item<bool>());
    }
  }
}

TEST(SM3CudaDense, FoundInfOnTheDeviceSkipsAndCounts) {
  for (const float found : {0.0f, 1.0f, 2.0f}) {
    const Choice choice = choose([&](auto& o) {
      o.momentum = 0.9;
      o.variant = "I";
      o.found_inf = at::scalar_tensor(found, at::kFloat);
      o.skipped = at::scalar_tensor(int64_t{3}, at::kLong);
    });
    const Problem before = make(many_shapes(), choice);
    const Problem cuda = before.clone();
    const Problem cpu = before.clone();
    run_on_host(cuda, choice);
    const bool skips = found != 0;
    EXPECT_EQ(choice.options.skipped->item<int64_t>(), skips ? 4 : 3);
    run_cpu(cpu, choice);
    expect_same(cpu, cuda);
    EXPECT_EQ(cuda.steps[0].item<int64_t>(), skips ? 6 : 7);
    EXPECT_EQ(static_cast<bool>(same(before.params[0], cuda.params[0])), skips);
  }
}

TEST(SM3CudaDense, LearningRatesOnTheDeviceHaveTheBitsOfTheCpu) {
  for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    Choice choice = choose([](auto& o) { o.weight_decay = 0.01; });
    choice.lr = at::scalar_tensor(0.3, type);
    compare(
        {{.shape = {9, 40}}, {.shape = {9, 4}, .dtype = at::kDouble}}, choice);
  }
}

TEST(SM3CudaDense, StepsOfTheHostHaveTheBitsOfTheCpu) {
  Choice choice = choose([](auto& o) {
    o.stochastic_rounding = true;
    o.seed = 3;
  });
  choice.host_steps = true;
  compare(many_shapes(at::kBFloat16), choice);
  const Problem empty = make({{.shape = {0}}}, choice);
  EXPECT_EQ(run_on_host(empty, choice), 0); // nothing to launch
}

TEST(SM3CudaDense, StepsFollowEachOther) {
  const Choice choice = choose([](auto& o) {
    o.momentum = 0.9;
    o.stochastic_rounding = true;
  });
  const Problem cpu = make(many_shapes(at::kBFloat16), choice);
  const Problem cuda = cpu.clone();
  for (int step = 0; step < 3; ++step) {
    run_cpu(cpu, choice);
    run_on_host(cuda, choice);
    expect_same(cpu, cuda);
  }
}

TEST(SM3CudaDense, TenThousandTensorsAreAtMostEightLaunches) {
  Specs specs;
  for (int i = 0; i < 2500; ++i) {
    // All that one pair of types and one mode may hold: matrices and vectors,
    // aligned or not, with int8 momentum and with float32.
    specs.push_back({.shape = {4, 20}, .momentum_dtype = at::kChar});
    specs.push_back({.shape = {20}});
    specs.push_back({.shape = {3, 7}});
    specs.push_back({.shape = {0}});
  }
  for (const char* variant : {"II", "I", "given"}) {
    for (const char* compat : {"", "enealor"}) {
      const Choice choice = choose([&](auto& o) {
        o.momentum = 0.9;
        o.variant = variant;
        o.compat = compat;
        o.beta2 = 0.9;
      });
      const Problem p = make(specs, choice);
      int launches = 0;
      run_on_host(p, choice, OnlyCounted{&launches});
      EXPECT_GE(launches, 2);
      EXPECT_LE(launches, 7); // and the copy of the tables
    }
  }
}

TEST(SM3CudaDense, EmptyTensorsOnlyCountTheirSteps) {
  const Problem p = make({{.shape = {0}}, {.shape = {0, 3}}}, {});
  EXPECT_EQ(run_on_host(p, {}), 1);
  EXPECT_EQ(p.steps[0].item<int64_t>(), 7);
  EXPECT_EQ(p.steps[1].item<int64_t>(), 7);
}

TEST(SM3CudaDense, ScratchIsAtMostEightBytesPerNumber) {
  const Choice choice = choose([](auto& o) { o.variant = "I"; });
  const Problem p = make({{.shape = {70, 300}}, {.shape = {50}}}, choice);
  SM3Arguments a = arguments_of(p, choice);
  SM3Pack<float> pack(a.h);
  for (const SM3Item& item : check_sm3(a)) {
    pack.add(sm3_geometry(a, item), {});
  }
  const int64_t numbers = 70 + 300; // the vector's numbers move where they are
  const int64_t scratch = pack.bytes() - pack.upload_bytes();
  EXPECT_LE(scratch, 8 * numbers);
}

} // namespace
} // namespace torch_sm3::testing
