// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Messages as collectives of a whole group, enqueued on the device.

#include "adasum_transport.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace torch_sm3::distributed {

/// Tensors of one device over a backend such as NCCL: one all-to-all of tensor
/// lists per step, in the same order on all ranks. The host never waits: the
/// current stream does. A dead peer is the watchdog's to find.
class CollectiveTransport : public Transport {
 public:
  CollectiveTransport(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      c10::Device device,
      std::chrono::milliseconds timeout);

  int rank() const override {
    return rank_;
  }
  int size() const override {
    return size_;
  }
  const std::string& place() const override {
    return place_;
  }
  bool host_waits() const override {
    return false;
  }
  c10::Device control_device() const override {
    return device_;
  }
  /// The order of the calls stands for `tag`.
  std::unique_ptr<Posted> post(
      std::vector<Message> receives,
      std::vector<Message> sends,
      int tag,
      std::string what) override;
  void wait(Posted& posted) override;
  void sum(at::Tensor& tensor, std::string what) override;
  /// Lets later calls fail; what is enqueued goes on.
  void interrupt() override {
    interrupted_ = true;
  }

 private:
  class Enqueued;
  template <class Call>
  auto guarded(const std::string& what, const Call& call) const;

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const c10::Device device_;
  const std::chrono::milliseconds timeout_;
  const int rank_;
  const int size_;
  const std::string place_;
  std::atomic<bool> interrupted_{false};
};

} // namespace torch_sm3::distributed
