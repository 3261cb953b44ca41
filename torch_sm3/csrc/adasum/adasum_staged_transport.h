// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Messages of another device's tensors, by way of pinned memory of the host.

#include "adasum_transport.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch_sm3::distributed {

/// CUDA tensors over a transport of CPU tensors; CPU tensors pass through.
class StagedTransport : public Transport {
 public:
  /// \param host   moves CPU tensors
  /// \param always stages CPU tensors as well, for tests
  explicit StagedTransport(
      std::unique_ptr<Transport> host,
      bool always = false);

  int rank() const override {
    return host_->rank();
  }
  int size() const override {
    return host_->size();
  }
  const std::string& place() const override {
    return host_->place();
  }
  bool host_waits() const override {
    return true;
  }
  /// Besides the rows on the device, this holds each of them, and what is
  /// sent, in pinned memory.
  int scratch_shares(c10::Device device) const override {
    return device.is_cpu() ? 1 : 3;
  }
  std::unique_ptr<Posted> post(
      std::vector<Message> receives,
      std::vector<Message> sends,
      int tag,
      std::string what) override;
  void wait(Posted& posted) override;
  void sum(at::Tensor& tensor, std::string what) override;
  void interrupt() override {
    host_->interrupt();
  }

 private:
  class Stage;
  bool is_staged(const at::Tensor& tensor) const;

  const std::unique_ptr<Transport> host_;
  const bool always_;
};

} // namespace torch_sm3::distributed
