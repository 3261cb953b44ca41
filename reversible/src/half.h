// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What blocks consist of, and one run of it.

#include <function.h>
#include <replay.h>
#include <rule.h>

#include <torch_sm3/reversible/remember.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch_sm3::reversible {

/// The step `streams[acc] = rule(streams[acc], F(streams[reads]..., side...))`.
struct Half {
  Rule rule;
  /// F; null where the value is the stream `reads[0]` itself.
  std::shared_ptr<const Function> function;
  size_t acc;
  std::vector<size_t> reads;
  std::string name; ///< how messages call it
};

/// Positions among the tensors that a call saves.
struct SavedRange {
  size_t begin = 0;
  size_t end = 0;
};

/// One half of one call.
struct Record {
  explicit Record(Half step) : half(std::move(step)) {}

  Half half;
  std::optional<Replay> replay; ///< nothing where there is no F
  /// Positions among the call's side tensors; nothing where F was given None.
  std::vector<std::optional<size_t>> side;
  size_t position = 0;
  bool with_grad = false; ///< F's bits are those of a run with grad

  /// What F remembered; null where there is no F.
  c10::intrusive_ptr<ReversibleMemory> memory;
  /// The accumulator before the half, kept where it cannot be rebuilt.
  at::Tensor kept;
  /// The rounding errors of its reconstruction: codes, bytes, wide, offsets.
  std::vector<at::Tensor> sidecar;

  SavedRange remembered, correction;
  bool is_kept = false; ///< `correction` is the accumulator

  /// F's arguments: `context..., side...`.
  std::vector<at::Tensor>
  arguments(const std::vector<at::Tensor>& context, at::TensorList side) const;

  /// Runs F in the world of its first run.
  ///
  /// \param values what F remembered then
  std::vector<at::Tensor> again(
      const std::vector<at::Tensor>& context,
      at::TensorList side,
      std::vector<at::Tensor> values,
      const at::Tensor& acc) const;
};

/// Returns `tensors[indices]`.
std::vector<at::Tensor> gather(
    const std::vector<at::Tensor>& tensors,
    const std::vector<size_t>& indices);

/// Returns the tensors without their graph.
std::vector<at::Tensor> detached(const std::vector<at::Tensor>& tensors);

} // namespace torch_sm3::reversible
