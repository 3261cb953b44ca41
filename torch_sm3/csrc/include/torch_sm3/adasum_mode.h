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

/// Who sends what to whom; the values travel in messages.
enum class Algorithm : int64_t {
  automatic = 0, ///< chosen from the number of ranks and the bucket's size
  pair = 1,      ///< two ranks swap whole buckets
  gather = 2,    ///< every rank receives the leaves of all ranks
  gram = 3,      ///< every rank owns some tiles; inner products go to all
  two_level = 4, ///< gram in runs of ranks, then across the runs
  vhdd = 5,      ///< recursive halving and doubling, 2^k ranks
};

/// How the ranks of one node are combined before the nodes are.
enum class Inner : int64_t {
  mean = 0,
  adasum = 1,
};

/// How much the ranks compare.
enum class Check : int64_t {
  off = 0,
  layout = 1, ///< sizes, dtype and options, before data moves
  hash = 2,   ///< the same, and a hash of the result
};

} // namespace torch_sm3::distributed
