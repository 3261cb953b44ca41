// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace torch_sm3::pipeline {

// What the random numbers of one forward of a deterministic run depend on.
struct SeedKey {
  uint64_t seed = 0;
  uint64_t step = 0;
  uint64_t stage = 0;
  uint64_t microbatch = 0;
  bool evaluation = false;
};

// The seed of that forward, below 2^63, and equal in all faces.
uint64_t seed_of(const SeedKey& key);

// Gives the caller's generators, of the CPU and of the tensors' devices, back
// as they were.
class KeptGenerators {
 public:
  explicit KeptGenerators(const std::vector<at::Tensor>& tensors);
  ~KeptGenerators();
  KeptGenerators(const KeptGenerators&) = delete;
  KeptGenerators& operator=(const KeptGenerators&) = delete;

  void seed(uint64_t number);

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> kept_;
};

} // namespace torch_sm3::pipeline
