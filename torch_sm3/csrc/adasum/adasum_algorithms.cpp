// SPDX-License-Identifier: Apache-2.0
#include "adasum_algorithms.h"

#include "adasum_gather.h"

#include <ATen/ops/empty.h>

namespace torch_sm3::distributed {

at::Tensor Scratch::take(size_t index, int64_t bytes, const at::Tensor& like) {
  if (buffers_.size() <= index) {
    buffers_.resize(index + 1);
  }
  at::Tensor& buffer = buffers_[index];
  if (!buffer.defined() || buffer.numel() < bytes ||
      buffer.device() != like.device()) {
    buffer = at::Tensor(); // frees before it allocates
    buffer = at::empty({bytes}, like.options().dtype(at::kByte));
  }
  return buffer.narrow(0, 0, bytes);
}

Algorithm choose_algorithm(
    const Plan& /*plan*/,
    int /*ranks*/,
    int /*local_world_size*/,
    bool /*alike*/,
    int64_t /*bytes*/,
    const char* /*op*/) {
  return Algorithm::gather;
}

void run_algorithm(Algorithm /*algorithm*/, const Job& job) {
  run_gather(job);
}

} // namespace torch_sm3::distributed
