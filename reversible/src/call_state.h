// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The node engine: one autograd node per half. The nodes of a call share a
/// CallState, which keeps the final streams once and a cursor for each running
/// backward pass: the streams as they were after some step. A node moves the
/// cursor to its own step, so the order in which autograd runs the nodes
/// affects speed only. The twin of torch_sm3/reversible/_node.py.

#include <half.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace torch_sm3::reversible {

using SavedTensors = std::vector<torch::autograd::SavedVariable>;

/// Streams of one backward pass, as they were after `position` steps.
struct Cursor {
  size_t position;
  std::vector<at::Tensor> streams;
  std::vector<at::Tensor> side;
  size_t left; ///< nodes that have not run yet in this pass
  std::shared_ptr<const SavedTensors> saved;

  /// Returns the saved tensors of a range.
  std::vector<at::Tensor> unpack(const SavedRange& range) const;
};

/// What the nodes of one call share.
struct CallState : std::enable_shared_from_this<CallState> {
  std::vector<std::shared_ptr<Record>> records;
  size_t nodes = 0; ///< records that have a node
  GeneratorStates states;
  /// Side tensors, until `close` saves them.
  std::vector<at::Tensor> side;

  /// Returns the position of a side tensor, which is added if it is new.
  size_t place(const at::Tensor& tensor);

  /// Saves the final streams, which are the only ones that the call keeps, side
  /// tensors, and what the records need.
  void close(const std::vector<at::Tensor>& streams);

  /// Returns this pass's cursor, moved to after `position` steps.
  std::shared_ptr<Cursor> seek(size_t position);

  /// Counts one node as run; forgets this pass's cursor after the last one.
  void done();

  /// Forgets this pass's cursor.
  void forget();

  /// Returns a record's accumulator before its half.
  ///
  /// \param values F's values without grad
  static at::Tensor rebuilt(
      const Record& record,
      const Cursor& cursor,
      const std::vector<at::Tensor>& values);

 private:
  std::shared_ptr<Cursor> current();
  static void move(const Record& record, Cursor& cursor, bool backwards);
  static SavedRange
  save(SavedTensors& all, const std::vector<at::Tensor>& tensors);
  void forget(int task);

  bool closed_ = false;
  size_t n_streams_ = 0;
  size_t n_side_ = 0;
  std::mutex mutex_; // guards what follows; not held while F or a hook runs
  std::shared_ptr<const SavedTensors> saved_; // null when it has been freed
  std::unordered_map<int, std::shared_ptr<Cursor>> cursors_;
};

/// Gives `out` the node that stands for a whole half.
///
/// \param out    the half's result, a new tensor without grad
/// \param inputs tensors among F's arguments, then the tensors it owns
at::Tensor half_node(
    const std::shared_ptr<CallState>& state,
    Record* record,
    const at::Tensor& out,
    const at::Tensor& acc,
    at::TensorList inputs);

} // namespace torch_sm3::reversible
