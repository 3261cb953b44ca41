// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/transport.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

// Collectives of the ranks with the same stages, over a group that nothing else
// uses, with a limit on every wait.
class Replicas {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  // `links` may be null; their loss ends every wait.
  Replicas(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      double timeout,
      Transport* links);

  int64_t rank() const {
    return group_->getRank();
  }
  int64_t size() const {
    return group_->getSize();
  }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const {
    return group_;
  }

  // The largest, and the sum, of each value over the ranks.
  std::vector<double> maximum(const std::vector<double>& values) const;
  std::vector<double> total(const std::vector<double>& values) const;
  // A value of each rank; of what can travel without tensors.
  std::vector<c10::IValue> gather(const c10::IValue& value) const;

  // Begins to replace a tensor by its sum over the ranks.
  Work start_sum(at::Tensor tensor) const;
  // Throws ReplicaLost or LinksLost.
  void wait(const Work& work) const;

 private:
  std::vector<double>
  reduce(const std::vector<double>& values, bool largest) const;
  std::string counterpart() const;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const double timeout_;
  Transport* const links_;
};

} // namespace torch_sm3::pipeline
