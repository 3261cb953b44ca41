// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <runtime/recorder.h>

#include <torch_sm3/pipeline/channel.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace torch_sm3::pipeline {

// Counts the bytes that a rank has in use, action by action: what the verifier
// predicts.
//
// What a stage made in the forward of a microbatch, or was given for it, is an
// account, which ends with its B or W; what is left of it by then is the
// gradients of weights. A message counts from its producer, or from its RECV,
// to its consumer, or until SEND number k + max_pending of its channel has gone
// out; what its account holds anyhow counts once.
class Ledger {
 public:
  // Stage and microbatch.
  using Cell = std::pair<uint16_t, uint32_t>;
  // Channel, producing stage, consuming stage, microbatch.
  using Message = std::tuple<Channel, uint16_t, uint16_t, uint32_t>;

  explicit Ledger(int64_t max_pending) : max_pending_(max_pending) {}

  void clear();

  // What arrived for an action of a cell waits for it to begin.
  void hold(Cell cell, const std::vector<at::Tensor>& arrived);
  // Begins an action of a cell, which uses up `arrived`.
  void open(Cell cell, const std::vector<at::Tensor>& arrived);
  // Ends it; returns the most bytes meanwhile.
  int64_t close();
  bool is_open() const {
    return open_.has_value();
  }
  // What a cell keeps is counted no longer.
  void settle(Cell cell);
  // What a cell holds is something else, such as a loss or a weight's gradient.
  void drop(Cell cell, const at::Tensor& tensor);

  // A cell made a message.
  void made(
      const Message& message,
      Cell cell,
      const std::vector<at::Tensor>& tensors);
  // It was used on this rank.
  void used(const Message& message);
  // It was sent to a peer.
  void sent(const Message& message, int64_t peer);

  // Bytes in use.
  int64_t live() const;

  // What a cell keeps for its backward.
  struct Kept {
    // Without what only waits to be sent.
    int64_t bytes = 0;
    // Part of them that the output is, too; -1 if it still waits to be sent,
    // since nobody can tell then.
    int64_t shared = 0;
  };
  Kept kept(Cell cell);
  // Bytes of a message that was made.
  int64_t bytes_of(const Message& message) const;

 private:
  // A tensor of a message. The reference is weak and keeps its address from
  // being used again.
  struct Part {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t bytes = 0;
    const c10::StorageImpl* address() const {
      return storage._unsafe_get_target();
    }
  };
  struct Parcel {
    Cell cell;
    std::vector<Part> parts;
  };
  using Addresses = std::vector<const c10::StorageImpl*>;

  int64_t waiting(const Parcel& parcel) const;
  // Storages of a cell's messages that are still to go or under way.
  Addresses unsent(Cell cell) const;
  void refresh(Cell cell);

  const int64_t max_pending_;
  StorageRecorder recorder_;
  std::optional<Cell> open_;
  std::map<Cell, Account> accounts_;
  // Of each cell, what goes to the next stage.
  std::map<Cell, std::vector<Part>> outputs_;
  std::map<Message, Parcel> made_;
  std::map<std::pair<int64_t, Channel>, std::deque<Parcel>> pending_;
};

} // namespace torch_sm3::pipeline
