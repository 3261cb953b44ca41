// SPDX-License-Identifier: Apache-2.0
// One chunk per rank, backwards in two parts: zb_h1 and zb_h2. The weight
// gradients owed fill the places where 1F1B waits.
#include <planner/planning.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

struct Limits {
  uint32_t forwards = 0; // before the first backward
  uint32_t owed = 0;     // I without their W in the steady state
  uint32_t flight = 0;   // F without their W
};

// zb_h1 warms up with p - r forwards and keeps p microbatches in flight.
// `extra` raises both; p - 1 gives zb_h2, whose warm-up no rank waits in.
Limits limits_of(uint32_t ranks, uint32_t rank, uint32_t extra) {
  return {
      std::min(ranks - rank + extra, 2 * (ranks - rank) - 1),
      std::min(2 * rank, rank + extra),
      ranks + extra};
}

Row zero_bubble_row(uint32_t rank, uint32_t m, const Limits& limits) {
  Row row;
  row.reserve(size_t{3} * m);
  uint32_t forwards = 0;
  uint32_t weights = 0;
  const auto push_forward = [&] {
    row.push_back(compute(Op::kForward, rank, forwards++));
  };
  const auto push_weight = [&] {
    row.push_back(compute(Op::kBackwardWeight, rank, weights++));
  };
  while (forwards < std::min(m, limits.forwards)) {
    push_forward();
  }
  for (uint32_t i = 0; i < m; ++i) {
    row.push_back(compute(Op::kBackwardInput, rank, i));
    const bool many_owed = i + 1 - weights > limits.owed;
    const bool full = forwards - weights >= limits.flight;
    if (many_owed || full) {
      push_weight();
    }
    if (forwards < m) {
      push_forward();
    }
  }
  while (weights < m) {
    push_weight();
  }
  return row;
}

} // namespace

Rows zero_bubble_rows(const Sizes& sizes, RankRange range, bool long_warmup) {
  const uint32_t p = sizes.ranks;
  const uint32_t m = sizes.microbatches;
  // With fewer than 2p - 1 microbatches the full warm-up of zb_h2 would be
  // slower than zb_h1: it then starts as many more as there are beyond p.
  const uint32_t extra = long_warmup && m > p ? std::min(m - p, p - 1) : 0;
  Rows rows;
  for (uint32_t rank = range.first; rank < range.last; ++rank) {
    rows.push_back(zero_bubble_row(rank, m, limits_of(p, rank, extra)));
  }
  return rows;
}

} // namespace torch_sm3::pipeline
