// SPDX-License-Identifier: Apache-2.0
// A training loop in TorchScript, saved and loaded in the middle, from C++.
#include <sm3_face_helpers.h>

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>

#include <sstream>

namespace torch_sm3::optim {
namespace {

// TorchScript is on its way out of torch: no test where it cannot compile.
bool has_torchscript() {
  try {
    torch::jit::Module probe("probe");
    probe.define("def forward(self, x: int):\n  return x + 1\n");
    return probe.forward({1}).toInt() == 2;
  } catch (const std::exception&) {
    return false;
  }
}

constexpr const char* kLoop = R"(
def step(self, x: Tensor, y: Tensor) -> Tensor:
    h = torch.tanh(torch.matmul(x, self.w1) + self.b1)
    loss = (torch.matmul(h, self.w2) - y).square().mean()
    loss.backward()
    params = [self.w1, self.b1, self.w2]
    grads: List[Optional[Tensor]] = [self.w1.grad, self.b1.grad, self.w2.grad]
    self.optimizer.step(params, grads)
    for grad in grads:
        if grad is not None:
            grad.zero_()
    return loss.detach()
)";

c10::IValue make_optimizer(const std::vector<c10::IValue>& arguments) {
  const c10::ClassTypePtr type =
      torch::getCustomClass("__torch__.torch.classes.torch_sm3.SM3");
  EXPECT_TRUE(type) << "the class is registered by the library";
  c10::IValue self = c10::ivalue::Object::create(
      c10::StrongTypePtr(nullptr, type), /*numSlots=*/1);
  std::vector<c10::IValue> all{self};
  all.insert(all.end(), arguments.begin(), arguments.end());
  type->getMethod("__init__")(all);
  return self;
}

torch::jit::Module make_trainer(const std::vector<c10::IValue>& arguments) {
  at::manual_seed(0);
  torch::jit::Module module("Trainer");
  module.register_parameter("w1", leaf(at::randn({4, 8})), false);
  module.register_parameter("b1", leaf(at::randn({8})), false);
  module.register_parameter("w2", leaf(at::randn({8, 3})), false);
  const c10::IValue optimizer = make_optimizer(arguments);
  module.register_attribute("optimizer", optimizer.type(), optimizer);
  module.define(kLoop);
  return module;
}

std::vector<at::Tensor> train(torch::jit::Module& module, uint64_t seed) {
  std::vector<at::Tensor> losses;
  for (uint64_t step = 0; step < 4; ++step) {
    at::manual_seed(seed + step);
    const at::Tensor x = at::randn({16, 4});
    const at::Tensor y = at::randn({16, 3});
    losses.push_back(module.get_method("step")({x, y}).toTensor());
  }
  return losses;
}

std::vector<at::Tensor> parameters(const torch::jit::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& param : module.parameters()) {
    all.push_back(param);
  }
  return all;
}

class Sm3Script : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_torchscript()) {
      GTEST_SKIP() << "this torch does not compile TorchScript";
    }
  }

  // Fused after some calls, the model itself rounds otherwise.
  torch::jit::GraphOptimizerEnabledGuard as_written_{false};
};

TEST_F(Sm3Script, ALoopContinuesFromItsFileBitForBit) {
  const std::vector<std::vector<c10::IValue>> cases{
      {}, {0.05, 0.9}, {0.05, 0.9, 0.5, 1e-6, 0.01, "I", "google"}};
  for (const auto& arguments : cases) {
    torch::jit::Module module = make_trainer(arguments);
    const auto before = copies(parameters(module));
    train(module, 0);
    EXPECT_FALSE(before[0].equal(parameters(module)[0]));
    std::stringstream file;
    module.save(file);
    torch::jit::Module loaded = torch::jit::load(file);
    expect_equal(train(module, 100), train(loaded, 100));
    expect_equal(parameters(module), parameters(loaded));
  }
}

TEST_F(Sm3Script, TheLoopHasTheBitsOfTheCppOptimizer) {
  torch::jit::Module module = make_trainer({0.05, 0.9});
  torch::jit::Module twin = make_trainer({0.05, 0.9});
  const auto params = parameters(twin);
  SM3 optimizer(params, SM3Options(0.05).momentum(0.9));
  for (uint64_t step = 0; step < 4; ++step) {
    set_grads(params, step);
    optimizer.step();
    const auto own = parameters(module);
    set_grads(own, step);
    c10::List<std::optional<at::Tensor>> grads;
    for (const at::Tensor& param : own) {
      grads.push_back(param.grad());
    }
    const c10::IValue object = module.attr("optimizer");
    object.type()->expect<c10::ClassType>()->getMethod("step")(
        {object, own, grads});
    expect_equal(own, params);
  }
}

} // namespace
} // namespace torch_sm3::optim
