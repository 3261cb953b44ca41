// SPDX-License-Identifier: Apache-2.0
#include <cuda_on_host.h>

#include <residual_kernel.cuh>

#include <torch_sm3/reversible/call.h>
#include <torch_sm3/reversible/residual.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/jit/frontend/sugared_value.h>
#include <torch/script.h>

#include <cmath>
#include <cstring>
#include <sstream>
#include <thread>
#include <vector>

namespace torch_sm3::reversible {
namespace {

// --- kernels ---------------------------------------------------------------

template <class T>
std::vector<T> numbers(int64_t count, uint32_t seed) {
  std::vector<T> result(count);
  for (T& x : result) {
    seed = seed * 1664525u + 1013904223u;
    round_to(std::ldexp(static_cast<double>(seed) - 2e9, -24 - seed % 7), &x);
  }
  return result;
}

template <class T>
at::Tensor as_tensor(std::vector<T>& numbers, at::ScalarType type) {
  return at::from_blob(
      numbers.data(), {static_cast<int64_t>(numbers.size())}, type);
}

template <class A, class V>
void compare_device_with_host(at::ScalarType a, at::ScalarType v) {
  for (const int64_t count : {int64_t{1}, int64_t{300}}) {
    auto acc = numbers<A>(count, 1);
    auto value = numbers<V>(count, 2);
    std::vector<A> device(count);
    for (const bool subtract : {false, true}) {
      const auto op = subtract ? reversible_sub : reversible_add;
      const at::Tensor host = op(as_tensor(acc, a), as_tensor(value, v));
      // The kernel's own block size is for a GPU; any other must do too.
      const unsigned threads = 32;
      const int64_t per_block = int64_t{threads} * kResidualPerThread;
      const auto blocks =
          static_cast<unsigned>((count + per_block - 1) / per_block);
      const auto kernel =
          subtract ? residual_kernel<true, A, V> : residual_kernel<false, A, V>;
      cuda_on_host::launch(
          blocks,
          threads,
          kernel,
          acc.data(),
          value.data(),
          device.data(),
          count);
      EXPECT_EQ(
          0,
          std::memcmp(host.const_data_ptr(), device.data(), count * sizeof(A)))
          << a << " " << v;
    }
  }
}

template <class A>
void compare_for_acc(at::ScalarType acc) {
  compare_device_with_host<A, double>(acc, at::kDouble);
  compare_device_with_host<A, float>(acc, at::kFloat);
  compare_device_with_host<A, Half>(acc, at::kHalf);
  compare_device_with_host<A, BFloat16>(acc, at::kBFloat16);
}

TEST(ReversibleKernel, DeviceEqualsHostBitForBit) {
  compare_for_acc<double>(at::kDouble);
  compare_for_acc<float>(at::kFloat);
  compare_for_acc<Half>(at::kHalf);
  compare_for_acc<BFloat16>(at::kBFloat16);
}

TEST(ReversibleKernel, BitsDoNotDependOnThreads) {
  const at::Tensor acc = at::randn({300000});
  const at::Tensor value = at::randn({300000}).to(at::kBFloat16);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor one = reversible_add(acc, value);
  at::set_num_threads(3);
  const at::Tensor three = reversible_add(acc, value);
  at::set_num_threads(threads);
  EXPECT_TRUE(at::equal(one, three));
  EXPECT_TRUE(at::equal(one, acc + value.to(at::kFloat)));
}

// --- node engine -----------------------------------------------------------

constexpr int64_t kWidth = 6;

torch::jit::Module mlp(double dropout) {
  torch::jit::Module m("Mlp");
  const auto options = at::TensorOptions(at::kDouble);
  const auto weight = [&](int64_t rows, int64_t columns) {
    return (at::randn({rows, columns}, options) / std::sqrt(rows))
        .requires_grad_();
  };
  m.register_parameter("w", weight(kWidth, 9), false);
  m.register_parameter("u", weight(9, kWidth), false);
  m.register_buffer("runs", at::zeros({}, options));
  m.register_attribute("training", c10::BoolType::get(), true);
  m.register_attribute("p", c10::FloatType::get(), dropout);
  m.define(R"(
    def forward(self, x):
        self.runs.add_(1)
        h = torch.dropout(torch.tanh(torch.matmul(x, self.w)), self.p, self.training)
        return torch.matmul(h, self.u)
  )");
  return m;
}

// Text compiled in C++ knows the operators of `torch`, but not ours.
struct WithOurOperators : torch::jit::Resolver {
  std::shared_ptr<torch::jit::SugaredValue> resolveValue(
      const std::string& name,
      torch::jit::GraphFunction& m,
      const torch::jit::SourceRange& loc) override {
    if (name == "torch_sm3") {
      return std::make_shared<torch::jit::BuiltinModule>("torch_sm3");
    }
    return torch::jit::nativeResolver()->resolveValue(name, m, loc);
  }
};

// The sequence as a module of its own: F and G are submodules.
torch::jit::Module chain(double dropout) {
  torch::jit::Module m("Chain");
  m.register_module("f", mlp(dropout));
  m.register_module("g", mlp(dropout));
  m.define(
      R"(
    def forward(self, x):
        call = torch_sm3.reversible_begin([x, x], "")
        a = torch_sm3.reversible_half_residual(call, self.f, x, [x], [])
        b = torch_sm3.reversible_half_residual(call, self.g, x, [a], [])
        y = torch_sm3.reversible_end(call, [a, b])
        return torch.sum(torch.sin(y[0])) + torch.sum(y[1] * y[1])
    def plain(self, x):
        a = x + self.f.forward(x)
        b = x + self.g.forward(a)
        return torch.sum(torch.sin(a)) + torch.sum(b * b)
  )",
      std::make_shared<WithOurOperators>());
  return m;
}

std::vector<at::Tensor> gradients(const torch::jit::Module& m) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& p : m.parameters()) {
    result.push_back(p.grad().clone());
    p.mutable_grad().reset();
  }
  return result;
}

void expect_close(
    const std::vector<at::Tensor>& a,
    const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::allclose(a[i], b[i], 1e-10, 1e-12)) << i;
  }
}

at::Tensor input() {
  return at::randn({4, kWidth}, at::TensorOptions(at::kDouble));
}

class ReversibleNode : public testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(0);
  }
};

TEST_F(ReversibleNode, TrainsAModuleMadeFromText) {
  torch::jit::Module m = chain(0.0);
  const at::Tensor x = input();
  double before = 0, after = 0;
  for (int step = 0; step < 5; ++step) {
    at::Tensor loss = m.forward({x}).toTensor();
    loss.backward();
    const auto got = gradients(m);
    m.get_method("plain")({x}).toTensor().backward();
    const auto want = gradients(m);
    ASSERT_EQ(4u, want.size());
    expect_close(got, want);
    (step == 0 ? before : after) = loss.item<double>();
    const at::NoGradGuard no_grad;
    size_t i = 0;
    for (at::Tensor p : m.parameters()) {
      p.sub_(got[i++], 0.02);
    }
  }
  EXPECT_LT(after, before);
}

TEST_F(ReversibleNode, ReplaysDropoutAndCountsBuffersOnce) {
  torch::jit::Module m = chain(0.5);
  const at::Tensor x = input();
  at::manual_seed(7);
  m.forward({x}).toTensor().backward();
  const auto got = gradients(m);
  EXPECT_EQ(1.0, m.attr("f").toModule().attr("runs").toTensor().item<double>());
  const at::Tensor draw = at::rand({3});
  at::manual_seed(7);
  m.get_method("plain")({x}).toTensor().backward();
  expect_close(got, gradients(m));
  EXPECT_TRUE(at::equal(draw, at::rand({3})));
}

TEST_F(ReversibleNode, SavedAndLoadedItTrainsOnWithEqualBits) {
  torch::jit::Module m = chain(0.3);
  std::stringstream file;
  m.save(file);
  torch::jit::Module loaded = torch::jit::load(file);
  const at::Tensor x = input();
  std::vector<std::vector<at::Tensor>> results;
  for (torch::jit::Module* module : {&m, &loaded}) {
    at::manual_seed(3);
    module->forward({x}).toTensor().backward();
    results.push_back(gradients(*module));
  }
  for (size_t i = 0; i < results[0].size(); ++i) {
    EXPECT_TRUE(at::equal(results[0][i], results[1][i]));
  }
}

TEST_F(ReversibleNode, CxxCallsEqualThePlainRun) {
  torch::jit::Module f = mlp(0.0);
  const at::Tensor x1 = input().requires_grad_();
  const at::Tensor x2 = input().requires_grad_();
  const auto call = reversible_begin({x1, x2}, "");
  const at::Tensor y1 = reversible_half_residual(call, f._ivalue(), x1, {x2});
  const at::Tensor y2 = reversible_half_residual(call, f._ivalue(), x2, {y1});
  const auto y = reversible_end(call, {y2, y1});
  EXPECT_TRUE(y[0].is_same(y2) && y[1].is_same(y1));
  const auto weights = f.parameters();
  std::vector<at::Tensor> inputs{x1, x2};
  for (const at::Tensor& weight : weights) {
    inputs.push_back(weight);
  }
  const at::Tensor loss = (y1.sin() + y2 * y2).sum();
  const auto got = torch::autograd::grad({loss}, inputs, {}, true);
  const auto again = torch::autograd::grad({loss}, inputs);
  const at::Tensor z1 = x1 + f.forward({x2}).toTensor();
  const at::Tensor z2 = x2 + f.forward({z1}).toTensor();
  EXPECT_TRUE(at::equal(y1, z1) && at::equal(y2, z2));
  const at::Tensor plain = (z1.sin() + z2 * z2).sum();
  expect_close(got, torch::autograd::grad({plain}, inputs));
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(at::equal(got[i], again[i]));
  }
  EXPECT_THROW(torch::autograd::grad({y1.sum()}, inputs), c10::Error);
}

TEST_F(ReversibleNode, GradientsOfEveryInputEqualFiniteDifferences) {
  torch::jit::Module f = mlp(0.0);
  std::vector<at::Tensor> inputs{input(), input()};
  for (const at::Tensor& p : f.parameters()) {
    inputs.push_back(p);
  }
  const auto loss = [&] {
    const auto call = reversible_begin({inputs[0], inputs[1]}, "");
    const at::Tensor y1 =
        reversible_half_residual(call, f._ivalue(), inputs[0], {inputs[1]});
    const at::Tensor y2 =
        reversible_half_residual(call, f._ivalue(), inputs[1], {y1});
    reversible_end(call, {y1, y2});
    return (y1.sin() + y2 * y2).sum();
  };
  inputs[0].requires_grad_();
  inputs[1].requires_grad_();
  const auto grads = torch::autograd::grad({loss()}, inputs);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < inputs.size(); ++i) {
    double* x = inputs[i].mutable_data_ptr<double>();
    for (int64_t j = 0; j < inputs[i].numel(); ++j) {
      const double old = x[j], h = 1e-6;
      x[j] = old + h;
      const double up = loss().item<double>();
      x[j] = old - h;
      const double down = loss().item<double>();
      x[j] = old;
      const double want = (up - down) / (2 * h);
      EXPECT_NEAR(want, grads[i].reshape(-1)[j].item<double>(), 1e-6);
    }
  }
}

TEST_F(ReversibleNode, HooksFireOnce) {
  torch::jit::Module m = chain(0.0);
  int calls = 0;
  for (const at::Tensor& p : m.parameters()) {
    p.register_hook([&calls](const at::Tensor& grad) {
      ++calls;
      return grad * 2;
    });
  }
  const at::Tensor x = input();
  m.forward({x}).toTensor().backward();
  const auto got = gradients(m);
  EXPECT_EQ(4, calls);
  m.get_method("plain")({x}).toTensor().backward();
  EXPECT_EQ(8, calls);
  expect_close(got, gradients(m));
}

TEST_F(ReversibleNode, TwoThreadsTrainTwoModules) {
  const at::Tensor x = input();
  std::vector<torch::jit::Module> modules{chain(0.0), chain(0.0)};
  std::vector<std::thread> threads;
  threads.reserve(modules.size());
  for (auto& module : modules) {
    threads.emplace_back([&module, &x] {
      for (int i = 0; i < 5; ++i) {
        module.forward({x}).toTensor().backward();
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (auto& module : modules) {
    auto got = gradients(module);
    module.get_method("plain")({x}).toTensor().backward();
    for (at::Tensor& grad : got) {
      grad = grad / 5;
    }
    expect_close(got, gradients(module));
  }
}

TEST_F(ReversibleNode, StreamsAreReleased) {
  torch::jit::Module f = mlp(0.0);
  const at::Tensor x1 = input(), x2 = input();
  c10::weak_intrusive_ptr<c10::TensorImpl> alive(x1.getIntrusivePtr());
  at::Tensor loss;
  {
    const auto call = reversible_begin({x1, x2}, "");
    const at::Tensor y1 = reversible_half_residual(call, f._ivalue(), x1, {x2});
    alive = c10::weak_intrusive_ptr<c10::TensorImpl>(y1.getIntrusivePtr());
    reversible_end(call, {y1, x2});
    loss = y1.sum();
  }
  EXPECT_TRUE(alive.expired());
  loss.backward();
}

TEST_F(ReversibleNode, RefusesWhatItCannotDo) {
  torch::jit::Module f = mlp(0.0);
  const at::Tensor x = input().requires_grad_(), z = input();
  const auto call = reversible_begin({x, z}, "");
  const at::Tensor y = reversible_half_residual(call, f._ivalue(), x, {z});
  EXPECT_THROW(y.sum().backward(), c10::Error);
  EXPECT_THROW(reversible_begin({x}, "{\"exact\": 1}"), c10::ValueError);
  EXPECT_THROW(
      reversible_half_residual(call, c10::IValue(1), y, {z}), c10::TypeError);
  reversible_end(call, {y, z});
  EXPECT_THROW(
      torch::autograd::grad({y.sum()}, {x}, {}, true, true),
      c10::NotImplementedError);
}

} // namespace
} // namespace torch_sm3::reversible
