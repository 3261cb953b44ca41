// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <runtime/replicas.h>

#include <torch_sm3/pipeline/runtime.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace c10d {
class GradBucket;
}

namespace torch_sm3::pipeline {

// Reduces the gradients of one stage after the other over the replicas, once
// per step, and finishes all at the end.
class Reducer {
 public:
  // `stages` in the order of their reductions. `sums`: gradients are sums that
  // are divided at the end.
  Reducer(
      Replicas* replicas,
      const RunnerOptions& options,
      std::vector<Stage> stages,
      bool sums);
  ~Reducer();

  // Whether the reduction is a mean of the replicas, in some sense.
  bool shrinks_sums() const;

  // Cuts the parameters that require a gradient in this step into buckets.
  void begin();
  // Starts the reduction of a stage. A rank that failed takes part in agreeing
  // only. Throws PeerFailedError if another replica has failed, ReplicaLost and
  // LinksLost.
  void start(int64_t stage, bool failed);
  // Waits for all that was started; a failed step does not keep the results.
  void finish(bool keep);

 private:
  struct Running;
  using Part = std::vector<at::Tensor>;

  Running run(const Part& part, size_t index, const std::vector<bool>& there);
  at::Tensor result_of(Running& running) const;

  Replicas* const replicas_;
  const Reduce reduce_;
  const std::shared_ptr<c10d::CommHookInterface> hook_;
  std::vector<Stage> stages_;
  std::map<int64_t, std::vector<Part>> parts_;
  std::map<int64_t, size_t> first_; // number of a stage's first bucket
  size_t count_ = 0;                // of buckets
  std::vector<Running> running_;
};

} // namespace torch_sm3::pipeline
