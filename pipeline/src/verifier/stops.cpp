// SPDX-License-Identifier: Apache-2.0
#include <verifier/stops.h>

#include <algorithm>

namespace torch_sm3::pipeline {

std::vector<std::vector<uint32_t>> members_of(const Schedule& schedule) {
  std::vector<std::vector<uint32_t>> members;
  for (const auto& tie : schedule.ties) {
    std::vector<uint32_t> ranks;
    for (const uint16_t stage : tie) {
      ranks.push_back(schedule.placement[stage]);
    }
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    members.push_back(std::move(ranks));
  }
  std::vector<uint32_t> optimizing;
  for (uint32_t rank = 0; rank < schedule.ranks; ++rank) {
    const auto& row = schedule.rows[rank];
    // OPTIM is the last action where there is one.
    if (std::any_of(row.rbegin(), row.rend(), [](Action action) {
          return action.op == Op::kOptimizer;
        })) {
      optimizing.push_back(rank);
    }
  }
  members.push_back(std::move(optimizing));
  return members;
}

} // namespace torch_sm3::pipeline
