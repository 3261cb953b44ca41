// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Requests to combine buckets, worked through one at a time.

#include "adasum_agreement.h"
#include "adasum_algorithms.h"
#include "adasum_flat.h"
#include "adasum_request.h"
#include "adasum_transport.h"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace torch_sm3::distributed {

/// Runs requests over one transport, one at a time, in the same order on all
/// ranks.
class Exchange {
 public:
  /// \param ranks  used by this object only, or by a caller that keeps order
  /// \param shards the ranks that hold the other shards, or null
  Exchange(
      std::unique_ptr<Transport> ranks,
      std::unique_ptr<Transport> shards = nullptr);

  /// Compares library builds and instruction sets with all ranks; collective.
  void introduce(int local_world_size, const std::string& what);

  /// Takes what `introduce` found out at an earlier time.
  void recognise(const Fingerprint& fingerprint, int64_t calls) {
    fingerprint_ = fingerprint;
    sequence_ = calls;
  }
  const Fingerprint& fingerprint() const {
    return fingerprint_;
  }
  /// Number of calls so far.
  int64_t calls() const {
    return sequence_;
  }

  /// What a bucket of a plan will be combined by; ValueError if it cannot.
  ///
  /// \param device type of the tensors
  /// \param bytes  of the bucket
  Algorithm algorithm(
      const Plan& plan,
      c10::DeviceType device,
      int64_t bytes,
      const char* op) const;

  /// Combines the tensors of the request; blocks on the CPU.
  Outcome run(const Request& request);

  /// Every rank's copy of a small CPU tensor, [p, ...].
  at::Tensor swap(const at::Tensor& tensor, const std::string& what);

  /// Flips a bit of the next result before it is hashed; for tests.
  void damage(int64_t byte) {
    damage_ = byte;
  }

  /// Lets the current wait and all later ones fail; from any thread.
  void interrupt();

  int rank() const {
    return ranks_->rank();
  }
  int size() const {
    return ranks_->size();
  }

 private:
  void agree(const Request& request, const Flat& flat);
  void
  pass_on(const Request& request, const Flat& flat, Outcome& outcome) const;
  void combine(const Request& request, const Flat& flat, Outcome& outcome);
  void reduce(const Request& request, const Flat& flat);

  std::shared_ptr<const Plan>
  plan_for(const std::shared_ptr<const Plan>& plan, c10::Device device);

  const std::unique_ptr<Transport> ranks_;
  const std::unique_ptr<Transport> shards_;
  Fingerprint fingerprint_;
  bool one_device_type_ = true;
  Scratch scratch_;
  std::map<std::shared_ptr<const Plan>, std::shared_ptr<const Plan>>
      smaller_plans_;
  int64_t sequence_ = 0;
  std::atomic<int64_t> damage_{-1};
};

} // namespace torch_sm3::distributed
