// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// All that a state has running: a worker for each way that tensors travel.

#include "adasum_channel.h"
#include "adasum_worker.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace torch_sm3::distributed {

/// Combines buckets over a process group that nobody else uses.
class Engine {
 public:
  /// Collective over the group.
  ///
  /// \param shards           the ranks that hold the other shards, or null
  /// \param local_world_size ranks on this machine, 0 if unknown
  /// \param op               for errors
  Engine(
      const GroupPtr& group,
      const GroupPtr& shards,
      std::chrono::milliseconds timeout,
      int local_world_size,
      const char* op);

  /// Throws on what can be refused without asking other ranks.
  void check(const Request& request, const char* op);

  /// What a bucket of CPU tensors will be combined by, or, if the group moves
  /// none, one of the device's.
  Algorithm algorithm(const Plan& plan, int64_t bytes, const char* op);

  /// Queues a request that `check` has passed; returns a ticket.
  int64_t submit(Request request, Worker::Done done);

  /// As the functions of Worker.
  at::Tensor swap(const at::Tensor& tensor, const std::string& what);
  Outcome outcome(int64_t ticket, const char* op);
  void forget(int64_t ticket);
  void drain();
  void close();

  void damage(int64_t byte);

  int rank() {
    return any().exchange().rank();
  }
  int size() {
    return any().exchange().size();
  }

 private:
  Worker& any() {
    return host_ ? *host_ : *enqueued_;
  }
  Worker& worker_for(const at::Tensor& tensor, const char* op);

  std::unique_ptr<Worker> host_;     // CPU tensors, and others over Gloo
  std::unique_ptr<Worker> enqueued_; // NCCL
  std::atomic<int64_t> tickets_{0};
};

} // namespace torch_sm3::distributed
