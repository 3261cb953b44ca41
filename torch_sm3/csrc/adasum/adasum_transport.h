// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Messages between the ranks of a group: the interface.

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch_sm3::distributed {

/// Messages between ranks; every wait ends within the timeout.
class Transport {
 public:
  /// A 1-D contiguous tensor on its way from or to a rank.
  struct Message {
    int peer;
    at::Tensor data;
  };

  /// Messages of one step that were posted together.
  class Posted {
   public:
    virtual ~Posted() = default;
  };

  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Ends every error message: who failed, in which group.
  virtual const std::string& place() const = 0;

  /// Posts all receives, then all sends of one step, and returns at once.
  ///
  /// At most one message per peer and direction; empty tensors are not sent.
  /// Both sides know the sizes. A message is only ever received by a step with
  /// the same `tag`, so that ranks that are out of step wait in vain instead of
  /// reading garbage. Every rank of the group calls it for each step, even with
  /// nothing to send or receive.
  ///
  /// \param receives written until `wait` returns
  /// \param sends    read until `wait` returns
  /// \param tag      31 bits that name the step
  /// \param what     operation and phase, for errors
  virtual std::unique_ptr<Posted> post(
      std::vector<Message> receives,
      std::vector<Message> sends,
      int tag,
      std::string what) = 0;

  /// Waits for what was posted. DistBackendError if a peer is dead, silent or
  /// too slow.
  virtual void wait(Posted& posted) = 0;

  /// Adds a tensor over all ranks with the backend's own all-reduce.
  virtual void sum(at::Tensor& tensor, std::string what) = 0;

  /// Lets the current wait and all later ones fail; from any thread.
  virtual void interrupt() = 0;

  /// Whether `wait` returns when the data is there (and not when the current
  /// stream will have it), so that the host may look at it.
  virtual bool host_waits() const = 0;

  /// Where tensors live whose contents the host reads or makes.
  virtual c10::Device control_device() const {
    return c10::kCPU;
  }

  /// By how much the scratch memory of tensors on a device is divided, because
  /// messages need memory as well.
  virtual int scratch_shares(c10::Device /*device*/) const {
    return 1;
  }

  int64_t bytes_sent() const {
    return bytes_sent_;
  }
  int64_t messages_sent() const {
    return messages_sent_;
  }

 protected:
  void count(const std::vector<Message>& sends) {
    for (const Message& message : sends) {
      if (message.data.numel() > 0) {
        bytes_sent_ += static_cast<int64_t>(message.data.nbytes());
        ++messages_sent_;
      }
    }
  }

 private:
  int64_t bytes_sent_ = 0;
  int64_t messages_sent_ = 0;
};

/// What `Transport::place` returns.
std::string place_of(int rank, int size, const std::string& group);

/// Throws the DistBackendError of a step that did not end well.
///
/// \param what     operation and phase
/// \param expected who was to do what
/// \param timeout  how long it was waited for
/// \param got      what happened instead
/// \param place    of the transport
[[noreturn]] void throw_backend_error(
    const std::string& what,
    const std::string& expected,
    std::chrono::milliseconds timeout,
    const std::string& got,
    const std::string& place);

} // namespace torch_sm3::distributed
