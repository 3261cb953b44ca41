// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

/// Whether a stage's backward runs in two parts.
enum class Split {
  kAuto,   ///< where something can be split
  kAlways, ///< an error where nothing can be split
  kNever,  ///< the input gradient's part does everything
};

/// Reads a Split from its name.
///
/// \param name "auto", "always" or "never"
TORCH_SM3_API Split split_of(const std::string& name);

/// The graph of one microbatch in one stage, and its backward.
///
/// Use: `enter` before the stage runs, `leave` after it, then either `full`, or
/// `input` and later `weight`. Between them the object keeps nodes of the graph
/// and no tensor that came in or went out, so these may be dropped, or freed
/// with `free`, as soon as they have been sent.
///
/// The split: `input` runs the engine from the outputs to the stage's inputs.
/// At a node that owns both an input and a weight and can be run in parts, such
/// as a matrix product, it computes the input's gradient only and records the
/// gradient that entered. `weight` runs such nodes again, for the weights only,
/// so their accumulators and hooks run there, once. Other nodes that own both
/// run whole in `input`: the small gradients of built-in ones (a bias, a norm's
/// weight) wait for `weight`; those of custom Functions, checkpointed regions
/// and reversible blocks are accumulated at once, unless the weight has uses
/// that wait. Nothing is computed twice, and each sum adds the same numbers in
/// the same order as the full backward.
///
/// In a stage none of whose inputs requires grad, the layer that reads the
/// inputs runs in `weight` and everything above it is split as usual.
class TORCH_SM3_API StageBackward {
 public:
  StageBackward();
  ~StageBackward();
  StageBackward(StageBackward&&) noexcept;
  StageBackward& operator=(StageBackward&&) noexcept;

  /// Returns the tensors to give to the stage: aliases of those that require
  /// grad, which are not leaves, so that the stage may change them in place.
  ///
  /// \param tensors       what came in
  /// \param requires_grad which of them get a gradient
  std::vector<at::Tensor> enter(
      const std::vector<at::Tensor>& tensors,
      const std::vector<bool>& requires_grad);

  /// Remembers where the backward starts.
  ///
  /// \param outputs what the stage returned, or its loss
  void leave(const std::vector<at::Tensor>& outputs);

  /// Frees the memory of outputs that have been sent: each becomes an expanded
  /// tensor of one element, NaN where the type has it. An alias made before
  /// keeps the bytes. Left alone are views, tensors without a graph, aliases of
  /// what came in, and what a node of the graph may have saved.
  ///
  /// \param outputs those given to `leave`, or some of them
  /// \return which were freed
  std::vector<bool> free(const std::vector<at::Tensor>& outputs) const;

  /// Runs the whole backward.
  ///
  /// \param gradients of the outputs, in their order; undefined where absent
  /// \return gradients of what came in, undefined where there is none
  std::vector<at::Tensor> full(const std::vector<at::Tensor>& gradients);

  /// Runs the part that the stage before waits for.
  ///
  /// \param gradients as in `full`
  /// \param split     whether to split
  /// \return as in `full`
  std::vector<at::Tensor>
  input(const std::vector<at::Tensor>& gradients, Split split = Split::kAuto);

  /// Runs what `input` left, if anything, and lets go of the graph.
  void weight();

  /// Whether `input` left something for `weight`.
  bool owes_weight() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace torch_sm3::pipeline
