// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Messages over a c10d process group, point to point.

#include "adasum_transport.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace torch_sm3::distributed {

/// CPU tensors over a backend with send and receive, such as Gloo.
class GroupTransport : public Transport {
 public:
  /// \param group   the ranks
  /// \param timeout longest wait for one message
  GroupTransport(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
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
  std::unique_ptr<Posted> post(
      std::vector<Message> receives,
      std::vector<Message> sends,
      int tag,
      std::string what) override;
  void wait(Posted& posted) override;
  void sum(at::Tensor& tensor, std::string what) override;
  void interrupt() override;
  bool host_waits() const override {
    return true;
  }

 private:
  class Works;
  Works start(std::string what) const;
  void enter(const Works& works);
  void leave();
  [[noreturn]] void
  fail(const Works& works, const std::string& expected, const std::string& got);
  void wait_one(const Works& works, size_t index, const std::string& expected);

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const std::chrono::milliseconds timeout_;
  const int rank_;
  const int size_;
  const std::string place_;
  std::mutex mutex_;
  bool interrupted_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> waiting_;
};

} // namespace torch_sm3::distributed
