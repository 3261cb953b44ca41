// SPDX-License-Identifier: Apache-2.0
#include "adasum_steps.h"

#include "adasum_tags.h"

#include <utility>

namespace torch_sm3::distributed {

int tag_of_step(uint64_t call, const StepName& name) {
  uint64_t hash = mix(call, static_cast<uint64_t>(name.step));
  hash = mix(hash, static_cast<uint64_t>(name.level));
  hash = mix(hash, static_cast<uint64_t>(name.index));
  return tag_of(mix(hash, static_cast<uint64_t>(name.turn)));
}

std::string describe_step(const std::string& what, Step step) {
  constexpr const char* names[] = {
      "data",
      "inner products",
      "exponents",
      "weights",
      "result",
      "sums of inner products",
      "largest exponents"};
  return what + ", " + names[static_cast<size_t>(step)];
}

std::unique_ptr<Transport::Posted> post_step(
    const Job& job,
    const StepName& name,
    std::vector<Transport::Message> receives,
    std::vector<Transport::Message> sends) {
  return job.transport.post(
      std::move(receives),
      std::move(sends),
      tag_of_step(job.call, name),
      describe_step(job.what, name.step));
}

std::unique_ptr<Transport::Posted> post_parts(
    const Job& job,
    const StepName& name,
    const std::vector<Part>& parts,
    const at::Tensor& tensor) {
  std::vector<Transport::Message> receives, sends;
  const int rank = job.transport.rank();
  at::Tensor own;
  for (const Part& part : parts) {
    if (part.rank == rank) {
      own = tensor.narrow(0, part.rows.first, part.rows.size()).view({-1});
    }
  }
  for (const Part& part : parts) {
    if (part.rank != rank) {
      receives.push_back(
          {part.rank,
           tensor.narrow(0, part.rows.first, part.rows.size()).view({-1})});
      sends.push_back({part.rank, own});
    }
  }
  return post_step(job, name, std::move(receives), std::move(sends));
}

} // namespace torch_sm3::distributed
