// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Messages between all ranks of a process group, point to point.

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

namespace torch_sm3::distributed {

/// Swaps tensors with every other rank; every wait ends within the timeout.
class Transport {
 public:
  /// Receives and sends that were posted together.
  struct Posted {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    std::vector<int> peers;
    std::chrono::steady_clock::time_point deadline;
    std::string what; // operation and phase, for errors
  };

  /// \param group   the ranks
  /// \param timeout longest wait for one message
  Transport(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      std::chrono::milliseconds timeout);

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  /// Ends every error message: who failed, in which group.
  const std::string& place() const {
    return place_;
  }

  /// Posts all receives, then all sends, and returns at once.
  ///
  /// A message is only ever received by a call with the same `tag`, so that
  /// ranks that are out of step wait in vain instead of reading garbage.
  ///
  /// \param rows one tensor per rank; `rows[rank()]` is sent to all, the others
  ///             are received into
  /// \param tag  31 bits that name the message
  /// \param what operation and phase, for errors
  Posted post(const std::vector<at::Tensor>& rows, int tag, std::string what);

  /// Waits for what was posted.
  void wait(const Posted& posted);

  /// Adds a tensor over all ranks with the backend's own all-reduce.
  void sum(at::Tensor& tensor, std::string what);

  /// Lets the current wait and all later ones fail; from any thread.
  void interrupt();

 private:
  Posted start(std::string what) const;
  void enter(const Posted& posted);
  void leave();
  [[noreturn]] void fail(
      const Posted& posted,
      const std::string& expected,
      const std::string& got);
  void
  wait_one(const Posted& posted, size_t index, const std::string& expected);

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
