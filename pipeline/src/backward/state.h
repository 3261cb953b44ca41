// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <backward/cut.h>
#include <torch_sm3/pipeline/backward.h>

#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <utility>
#include <vector>

namespace torch_sm3::pipeline {

/// Where one microbatch stands.
enum class Phase { kForward, kLeft, kInputDone, kDone };

struct StageBackward::State {
  Phase phase = Phase::kForward;
  size_t arguments = 0;
  /// Position among the arguments of each input of `entry`.
  std::vector<size_t> tracked;
  OwnerOf<Entry> entry;
  /// Weak, so that no other storage can take the place of one that is gone.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> entered;
  edge_list outputs;
  Owed owed;

  std::pair<edge_list, variable_list>
  roots(const std::vector<at::Tensor>& gradients) const;
  std::vector<at::Tensor> input_gradients();
};

/// Throws unless a method is called in its turn.
inline void
expect_phase(bool condition, const char* what, const char* instead) {
  TORCH_CHECK(
      condition, "PipelineBackward: expected ", what, ", but got ", instead);
}

} // namespace torch_sm3::pipeline
