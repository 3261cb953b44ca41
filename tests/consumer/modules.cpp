// SPDX-License-Identifier: Apache-2.0
// Trains reversible blocks made of torch::nn modules, without Python and
// without a file from it: with SM3, on the grid. Fails unless the loss falls
// and a saved and loaded copy has the same bits.
#include <torch_sm3/torch_sm3.h>

#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <cstdio>
#include <sstream>

namespace reversible = torch_sm3::reversible;

namespace {

reversible::Sequence make(int64_t width) {
  const auto linear = [=] { return torch::nn::Linear(width, width); };
  return reversible::Sequence(
      reversible::Blocks{
          reversible::AdditiveCoupling(linear(), linear()),
          reversible::Swap(),
          reversible::HalfResidual(linear())},
      reversible::SequenceOptions().exact("grid"));
}

} // namespace

int main() {
  at::manual_seed(0);
  reversible::Sequence model = make(8);
  torch_sm3::optim::SM3 optimizer(model->parameters(), /*lr=*/0.05);
  const at::Tensor x = at::randn({16, 8}), target = at::randn({16, 8});
  const auto loss_of = [&](reversible::Sequence& sequence) {
    const auto y = sequence->forward({x, x});
    return (y[0] + y[1] - target).square().mean();
  };
  const double first = loss_of(model).item<double>();
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    loss_of(model).backward();
    optimizer.step();
  }
  std::stringstream file;
  torch::save(model, file);
  reversible::Sequence copy = make(8);
  torch::load(copy, file);
  const at::Tensor last = loss_of(model);
  std::printf("%.4f -> %.4f\n", first, last.item<double>());
  return last.item<double>() < first && at::equal(last, loss_of(copy)) ? 0 : 1;
}
