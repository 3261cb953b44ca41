// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Every kind of reversible block with its formula in plain operators.

#include <reversible_modules.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace torch_sm3::reversible {

namespace nn = torch::nn;

inline constexpr int64_t kWidth = 6;

inline at::Tensor
run(const torch::nn::Module& block, const char* name, const at::Tensor& x) {
  const auto child = block.named_children()[name];
  const auto linear = std::dynamic_pointer_cast<nn::LinearImpl>(child);
  return linear->forward(x);
}

/// One kind of block, and its formula in plain operators.
struct Kind {
  const char* name;
  size_t streams;
  std::function<AnyBlock()> make;
  std::function<Tensors(const Block&, const Tensors&)> formula;
};

inline Tensors additive(const Block& block, const Tensors& x) {
  const at::Tensor y1 = x[0] + run(block, "F", x[1]);
  return {y1, x[1] + run(block, "G", y1)};
}

inline at::Tensor affine_half(const at::Tensor& acc, const at::Tensor& both) {
  const at::Tensor r = both.slice(-1, 0, kWidth), t = both.slice(-1, kWidth);
  return acc * (1.5 * at::tanh(r / 1.5)).exp() + t;
}

inline Tensors affine(const Block& block, const Tensors& x) {
  const at::Tensor y1 = affine_half(x[0], run(block, "F", x[1]));
  return {y1, affine_half(x[1], run(block, "G", y1))};
}

inline Tensors momentum(const Block& block, const Tensors& x) {
  const at::Tensor v = 0.8 * x[1] + (1 - 0.8) * run(block, "F", x[0]);
  return {x[0] + v, v};
}

inline Tensors group(const Block& block, const Tensors& x) {
  const nn::Module& fs = *block.named_children()["Fs"];
  const at::Tensor y0 = x[0] + run(fs, "0", x[1] + x[2]);
  const at::Tensor y1 = x[1] + run(fs, "1", y0);
  return {y0, y1, x[2] + run(fs, "2", y1)};
}

inline Tensors half(const Block& block, const Tensors& x) {
  const nn::Module& layers = *block.named_children()["layers"];
  return {x[0] + run(layers, "0", x[1]), x[1]};
}

inline nn::Linear linear(int64_t out = kWidth) {
  return nn::Linear(kWidth, out);
}

inline std::vector<Kind> kinds() {
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

/// Blocks of one kind, swapped in between so that every stream is changed.
inline Sequence chain(const Kind& kind, const SequenceOptions& options = {}) {
  Blocks blocks;
  for (int i = 0; i < 3; ++i) {
    blocks.push_back(kind.make());
    blocks.push_back(Swap());
  }
  Sequence sequence(blocks, options);
  sequence->to(at::kDouble);
  return sequence;
}

inline Tensors
formula(const Kind& kind, const SequenceImpl& sequence, Tensors x) {
  for (size_t i = 0; i < sequence.size(); i += 2) {
    x = kind.formula(*sequence[i], x);
    std::swap(x[0], x[1]);
  }
  return x;
}

struct MaskedImpl : nn::Module {
  MaskedImpl() : linear(register_module("linear", nn::Linear(6, 6))) {}
  at::Tensor forward(
      const at::Tensor& x,
      const at::Tensor& memory,
      const at::Tensor& mask) {
    const at::Tensor y = linear->forward(x) + memory.mean(0);
    return mask.defined() ? y.masked_fill(mask, 0.0) : y;
  }
  nn::Linear linear;
};
TORCH_MODULE(Masked);

class ReversibleModules : public testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(0);
  }
};

} // namespace torch_sm3::reversible
