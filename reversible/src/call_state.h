// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The node engine: one autograd node per half-residual. The nodes of a call
/// share a CallState, which keeps the final streams once and a cursor for each
/// running backward pass: the streams as they were after some step. A node
/// moves the cursor to its own step, so the order in which autograd runs the
/// nodes affects speed only. The twin of torch_sm3/reversible/_node.py.

#include <replay.h>
#include <scripted.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace torch_sm3::reversible {

/// The step `streams[acc] += F(streams[reads]..., side...)` of one call.
struct Record {
  Scripted f;
  Replay replay;
  size_t acc;
  std::vector<size_t> reads;
  /// Positions among the call's side tensors; nothing where F was given None.
  std::vector<std::optional<size_t>> side;
  size_t position;
};

/// Streams of one backward pass, as they were after `position` steps.
struct Cursor {
  size_t position;
  std::vector<at::Tensor> streams;
  std::vector<at::Tensor> side;
  size_t left; ///< nodes that have not run yet in this pass
};

/// What the nodes of one call share.
struct CallState : std::enable_shared_from_this<CallState> {
  std::vector<std::unique_ptr<Record>> records;
  GeneratorStates states;
  /// Side tensors, until `close` saves them.
  std::vector<at::Tensor> side;

  /// Returns the position of a side tensor, which is added if it is new.
  size_t place(const at::Tensor& tensor);

  /// Saves the final streams: the only ones that the call keeps.
  void close(const std::vector<at::Tensor>& streams);

  /// Returns this pass's cursor, moved to after `position` steps.
  std::shared_ptr<Cursor> seek(size_t position);

  /// Counts one node as run; forgets the cursor after the last one.
  void done(Cursor& cursor);

 private:
  std::shared_ptr<Cursor> start(int task);
  void move(const Record& record, Cursor& cursor, bool backwards) const;
  void forget(int task);

  bool closed_ = false;
  bool freed_ = false;
  size_t n_streams_ = 0;
  std::vector<torch::autograd::SavedVariable> saved_;
  std::mutex mutex_; // guards the map, never held while F runs
  std::unordered_map<int, std::shared_ptr<Cursor>> cursors_;
};

/// F's arguments: `streams[reads]..., side...`.
std::vector<c10::IValue>
arguments_of(const Record& record, at::TensorList context, at::TensorList side);

/// Returns `acc + value` with the node that stands for the whole step.
///
/// \param inputs tensors among F's arguments, then the tensors it owns
at::Tensor half_residual_node(
    const std::shared_ptr<CallState>& state,
    Record* record,
    const at::Tensor& acc,
    const at::Tensor& value,
    at::TensorList inputs);

} // namespace torch_sm3::reversible
