// SPDX-License-Identifier: Apache-2.0
// Several chunks per rank, on a loop: interleaved, looped_bfs, forward.
#include <planner/planning.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

// The order in which a rank visits its chunks and microbatches: in groups of
// `group` microbatches, all of a group through one chunk, then the next chunk.
// Backwards visit the chunks of a group the other way round.
class VirtualOrder {
 public:
  VirtualOrder(const Sizes& sizes, uint32_t group)
      : sizes_(sizes), group_(group) {}

  uint64_t size() const {
    return uint64_t{sizes_.chunks} * sizes_.microbatches;
  }

  Action forward(uint64_t k, uint32_t rank) const {
    return visit(Op::kForward, k, rank);
  }
  Action backward(uint64_t k, uint32_t rank) const {
    return visit(Op::kBackward, k, rank);
  }

 private:
  Action visit(Op op, uint64_t k, uint32_t rank) const {
    const uint64_t whole = uint64_t{group_} * sizes_.chunks;
    const auto start = static_cast<uint32_t>(k / whole * group_);
    const uint32_t length = std::min(group_, sizes_.microbatches - start);
    const auto within = static_cast<uint32_t>(k % whole);
    uint32_t chunk = within / length;
    if (op == Op::kBackward) {
      chunk = sizes_.chunks - 1 - chunk;
    }
    return compute(op, chunk * sizes_.ranks + rank, start + within % length);
  }

  Sizes sizes_;
  uint32_t group_;
};

} // namespace

uint32_t automatic_group(uint32_t ranks, uint32_t microbatches) {
  if (microbatches <= ranks) {
    return microbatches;
  }
  // A last group of fewer than p microbatches would leave ranks waiting.
  uint32_t group = ranks;
  while (microbatches % group != 0 && microbatches % group < ranks) {
    ++group;
  }
  return group;
}

Rows interleaved_rows(const Sizes& sizes, RankRange range, uint32_t group) {
  const VirtualOrder order(sizes, group);
  Rows rows;
  for (uint32_t rank = range.first; rank < range.last; ++rank) {
    const uint64_t warmup = std::min(
        order.size(),
        2 * uint64_t{sizes.ranks - 1 - rank} +
            uint64_t{sizes.chunks - 1} * group);
    Row& row = rows.emplace_back();
    row.reserve(2 * order.size());
    for (uint64_t k = 0; k < order.size() + warmup; ++k) {
      if (k < order.size()) {
        row.push_back(order.forward(k, rank));
      }
      if (k >= warmup) {
        row.push_back(order.backward(k - warmup, rank));
      }
    }
  }
  return rows;
}

Rows looped_rows(const Sizes& sizes, RankRange range, bool backwards) {
  // One group of all microbatches: a chunk is done before the next begins.
  const VirtualOrder order(sizes, sizes.microbatches);
  Rows rows;
  for (uint32_t rank = range.first; rank < range.last; ++rank) {
    Row& row = rows.emplace_back();
    row.reserve((backwards ? 2 : 1) * order.size());
    for (uint64_t k = 0; k < order.size(); ++k) {
      row.push_back(order.forward(k, rank));
    }
    for (uint64_t k = 0; backwards && k < order.size(); ++k) {
      row.push_back(order.backward(k, rank));
    }
  }
  return rows;
}

} // namespace torch_sm3::pipeline
