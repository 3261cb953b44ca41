// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What a block of the C++ front consists of, and runs of it on a stack.

#include <half.h>
#include <streams.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_sm3::reversible {

/// One step of a block, on positions of the stack.
struct Step {
  /// If it has no reads it is a permutation.
  Half half;
  /// Which of the call's side tensors F takes.
  std::vector<int64_t> side;
  /// The permutation: items of the new top of the stack, and how many of the
  /// old one they replace.
  std::vector<size_t> indices;
  size_t n_in = 0;

  bool permutes() const {
    return half.reads.empty();
  }
};

/// The steps of a block.
struct Steps {
  size_t n_in = 0;
  size_t n_out = 0;
  std::vector<Step> list;
};

/// Returns for each item of the stack whether a half changes it.
std::vector<bool> changed_items(const Steps& steps, size_t items);

/// Runs the steps on `streams` and returns the resulting stack.
///
/// \param op who asks, for messages
std::vector<at::Tensor> run_steps(
    const char* op,
    const Steps& steps,
    Streams& streams,
    const std::vector<at::Tensor>& stack,
    const std::vector<at::Tensor>& side);

/// Runs the inverse with ordinary operators.
std::vector<at::Tensor> invert_steps(
    const char* op,
    const Steps& steps,
    const CallOptions& options,
    const std::vector<at::Tensor>& stack,
    const std::vector<at::Tensor>& side);

} // namespace torch_sm3::reversible
