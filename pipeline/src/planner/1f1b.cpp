// SPDX-License-Identifier: Apache-2.0
// One chunk per rank, backwards in one part: none, gpipe and 1f1b differ in the
// number of forwards before the first backward.
#include <planner/planning.h>

#include <algorithm>
#include <cmath>

namespace torch_sm3::pipeline {
namespace {

// `warmup` forwards, then a backward after each further forward, then the
// backwards that are left.
Row alternating_row(uint32_t stage, uint32_t m, uint32_t warmup) {
  Row row;
  row.reserve(size_t{2} * m);
  for (uint64_t i = 0; i < uint64_t{m} + warmup; ++i) {
    if (i < m) {
      row.push_back(compute(Op::kForward, stage, static_cast<uint32_t>(i)));
    }
    if (i >= warmup) {
      row.push_back(
          compute(Op::kBackward, stage, static_cast<uint32_t>(i - warmup)));
    }
  }
  return row;
}

} // namespace

uint64_t warmup_rounds(const PlanOptions& options) {
  if (options.warmup >= 0) {
    return static_cast<uint64_t>(options.warmup);
  }
  const Costs costs = options.costs.value_or(Costs{});
  double period = 0;
  for (const StageCosts& stage : costs.stages) {
    period = std::max(period, stage.forward + stage.full_backward());
  }
  const double link = std::max(
      options.link_cost,
      *std::max_element(costs.latency.begin(), costs.latency.end()));
  if (link <= 0 || period <= 0) {
    return 1;
  }
  // A ratio that is whole but for rounding must not cost a microbatch.
  const double waits = std::ceil(2 * link / period - 1e-9);
  return 1 + static_cast<uint64_t>(
                 std::min(waits, static_cast<double>(options.microbatches)));
}

Rows alternating_rows(
    const Sizes& sizes,
    RankRange range,
    const std::vector<uint32_t>& warmups) {
  Rows rows;
  for (uint32_t rank = range.first; rank < range.last; ++rank) {
    rows.push_back(
        alternating_row(rank, sizes.microbatches, warmups[rank - range.first]));
  }
  return rows;
}

std::vector<uint32_t>
warmups_1f1b(const PlanOptions& options, RankRange range) {
  const uint64_t m = static_cast<uint64_t>(options.microbatches);
  const uint64_t factor = std::min(warmup_rounds(options), m);
  std::vector<uint32_t> warmups;
  for (uint32_t rank = range.first; rank < range.last; ++rank) {
    const uint64_t below = static_cast<uint64_t>(options.ranks) - 1 - rank;
    warmups.push_back(static_cast<uint32_t>(std::min(m, below * factor)));
  }
  return warmups;
}

} // namespace torch_sm3::pipeline
