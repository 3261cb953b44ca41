// SPDX-License-Identifier: Apache-2.0
#include <runtime/random.h>

#include <ATen/Context.h>

#include <mutex>
#include <set>

namespace torch_sm3::pipeline {
namespace {

// SplitMix64 (Steele, Lea and Flood, 2014): every bit of the sum so far and of
// the next number changes half of the bits of the result.
uint64_t mix(uint64_t state, uint64_t next) {
  uint64_t z = state + next + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

} // namespace

uint64_t seed_of(const SeedKey& key) {
  uint64_t state = 0;
  for (const uint64_t next :
       {key.seed,
        key.step,
        key.stage,
        key.microbatch,
        uint64_t{key.evaluation}}) {
    state = mix(state, next);
  }
  return state >> 1;
}

KeptGenerators::KeptGenerators(const std::vector<at::Tensor>& tensors) {
  std::set<std::pair<int, int>> seen;
  const auto keep = [&](c10::Device device) {
    if (seen.emplace(static_cast<int>(device.type()), device.index()).second) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::lock_guard<std::mutex> lock(generator.mutex());
      at::Tensor state = generator.get_state();
      kept_.emplace_back(std::move(generator), std::move(state));
    }
  };
  keep(c10::Device(c10::kCPU));
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_cuda()) {
      keep(tensor.device());
    }
  }
}

KeptGenerators::~KeptGenerators() {
  for (auto& [generator, state] : kept_) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
}

void KeptGenerators::seed(uint64_t number) {
  for (auto& [generator, state] : kept_) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(number);
  }
}

} // namespace torch_sm3::pipeline
