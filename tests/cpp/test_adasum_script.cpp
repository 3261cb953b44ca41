// SPDX-License-Identifier: Apache-2.0

// The pure operators in a TorchScript program that C++ writes, saves and runs.

#include <torch_sm3/distributed.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/frontend/resolver.h>
#include <torch/csrc/jit/frontend/sugared_value.h>
#include <torch/csrc/jit/serialization/import.h>

#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace torch_sm3::distributed {
namespace {

constexpr const char* kSource = R"(
def forward(self, stack: Tensor, weights: Tensor, sizes: List[int],
            dtype: int) -> Tensor:
    gram = torch_sm3.adasum_gram(stack, sizes)
    c = torch_sm3.adasum_coefficients(
        gram, "tree", weights=weights, nodes=[2, 1], inner="adasum", scale=0.5)
    r = torch_sm3.adasum_combine(stack, c, sizes, dtype=dtype)
    return r + torch_sm3.adasum_pair(
        stack[0], stack[1], sizes, weight_a=2.0)
)";

// In C++ a script sees ATen's operators alone, so the library is a name of its
// own.
struct LibraryResolver : torch::jit::Resolver {
  std::shared_ptr<torch::jit::SugaredValue> resolveValue(
      const std::string& name,
      torch::jit::GraphFunction& function,
      const torch::jit::SourceRange& place) override {
    if (name == "torch_sm3") {
      return std::make_shared<torch::jit::BuiltinModule>(name);
    }
    return torch::jit::nativeResolver()->resolveValue(name, function, place);
  }

  c10::TypePtr resolveType(
      const std::string& /*name*/,
      const torch::jit::SourceRange& /*place*/) override {
    return nullptr;
  }
};

at::Tensor by_hand(const at::Tensor& stack, const at::Tensor& weights) {
  const std::vector<c10::SymInt> sizes = {3, 7};
  const std::vector<int64_t> nodes = {2, 1};
  const at::Tensor c = adasum_coefficients(
      adasum_gram(stack, sizes), "tree", weights, nodes, "adasum", 0.5);
  return adasum_combine(stack, c, sizes, at::kDouble) +
         adasum_pair(stack[0], stack[1], sizes, 2.0);
}

TEST(AdasumScript, SavedAndLoadedHasTheBitsOfTheOperators) {
  torch::jit::Module module("Reduce");
  module.define(kSource, std::make_shared<LibraryResolver>());
  std::stringstream file;
  module.save(file);
  torch::jit::Module loaded = torch::jit::load(file);
  const at::Tensor stack = at::randn({3, 10});
  at::Tensor weights = at::ones({3});
  weights[1] = 3.0;
  const std::vector<c10::IValue> arguments = {
      stack,
      weights,
      std::vector<int64_t>{3, 7},
      static_cast<int64_t>(at::kDouble)};
  const at::Tensor result = loaded.forward(arguments).toTensor();
  EXPECT_TRUE(at::equal(result, by_hand(stack, weights)));
}

} // namespace
} // namespace torch_sm3::distributed
