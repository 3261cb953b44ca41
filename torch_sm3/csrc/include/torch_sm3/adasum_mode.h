// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace torch_sm3::distributed {

/// How the gradients of all ranks become one; the values travel in messages.
enum class Mode : int64_t {
  tree = 0, ///< pairwise projections along a binary tree (the paper)
  psum = 1, ///< projections in one round, independent of the rank order
  mean = 2, ///< what data-parallel training does without Adasum
  sum = 3,
};

} // namespace torch_sm3::distributed
