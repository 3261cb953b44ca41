// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The streams of one call on their way forward: what both fronts, the scripted
/// call and the C++ modules, drive.

#include <call_state.h>
#include <exact.h>

#include <torch_sm3/reversible/options.h>

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace torch_sm3::reversible {

/// How the steps of a call are run.
enum class Run : uint8_t {
  kBare,  ///< without grad and without any trace
  kPlain, ///< with ordinary autograd
  kNodes  ///< with one node per half
};

/// Returns a half's rule under these options; a ValueError if it has none.
Rule exact_rule(const Half& half, const CallOptions& options);

class Streams {
 public:
  /// \param kept counts the halves whose input is kept; may be null
  Streams(
      const CallOptions& options,
      Run run,
      std::shared_ptr<std::atomic<int64_t>> kept = nullptr);

  /// Adds a stream and returns its number.
  ///
  /// \param op      who asks, for messages
  /// \param changes whether a half will change it
  size_t add(const char* op, const at::Tensor& stream, bool changes);

  /// Adds a stream that begins as another one is now.
  size_t copy(size_t stream);

  const at::Tensor& value(size_t stream) const {
    return values_[stream];
  }

  size_t size() const {
    return values_.size();
  }

  /// Runs one half.
  ///
  /// \param side further arguments of F; an undefined tensor stands for None
  void run(Half half, const std::vector<at::Tensor>& side);

  /// Keeps the final streams for the backward pass.
  void close();

 private:
  void check_precision(size_t stream) const;
  void plain(const Half& half, const std::vector<at::Tensor>& side);
  void recorded(Half half, const std::vector<at::Tensor>& side);
  std::vector<at::Tensor> first(
      Record& record,
      const std::vector<at::Tensor>& context,
      const std::vector<at::Tensor>& inputs);
  bool probe(
      const Record& record,
      const std::vector<at::Tensor>& context,
      std::vector<at::Tensor>& values) const;

  CallOptions options_;
  Run run_;
  Corrections corrections_;
  // The nodes own the state, but never the streams: those hold the nodes.
  std::shared_ptr<CallState> state_;
  std::vector<at::Tensor> values_;
  std::vector<int64_t> additions_;
  std::optional<at::Device> device_; // of the streams that are changed
};

} // namespace torch_sm3::reversible
