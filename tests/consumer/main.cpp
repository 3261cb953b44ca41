// SPDX-License-Identifier: Apache-2.0
// consumer MODEL STEPS TRAINED: loads a TorchScript model, trains it with SM3
// and saves it. Prints one loss per step, in hexadecimal: the exact bits.
#include <torch_sm3/torch_sm3.h>

#include <ATen/Parallel.h>
#include <torch/script.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

// A model that brings its optimizer trains itself; for another we make one.
void train(torch::jit::Module& model, int steps) {
  const bool trainer = model.hasattr("optimizer");
  std::vector<at::Tensor> params;
  for (const at::Tensor& param : model.parameters()) {
    params.push_back(param);
  }
  torch_sm3::optim::SM3 optimizer(params, /*lr=*/0.01);
  // The model brings its data as attributes.
  const at::Tensor inputs = model.attr("inputs").toTensor();
  const at::Tensor targets = model.attr("targets").toTensor();
  for (int step = 0; step < steps; ++step) {
    const at::Tensor loss = model.forward({inputs, targets}).toTensor();
    std::printf("%a\n", loss.item<double>());
    if (!trainer) {
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
    }
  }
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: consumer MODEL STEPS TRAINED\n");
    return 2;
  }
  // Sums over several threads may round differently; Python does the same.
  at::set_num_threads(1);
  torch::jit::Module model = torch::jit::load(argv[1]);
  train(model, std::atoi(argv[2]));
  model.save(argv[3]);
  return 0;
}
