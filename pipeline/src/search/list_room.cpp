// SPDX-License-Identifier: Apache-2.0
#include <search/list_room.h>

#include <algorithm>
#include <cmath>

namespace torch_sm3::pipeline {

ListRoom::ListRoom(const Schedule& shape, const ListPolicy& policy)
    : policy_(policy),
      ranks_(shape.placement),
      held_(shape.ranks),
      free_(shape.stages),
      most_(shape.stages, ~0u) {
  std::vector<std::vector<uint32_t>> stages(shape.ranks);
  for (uint32_t s = 0; s < shape.stages; ++s) {
    stages[ranks_[s]].push_back(s);
  }
  for (const std::vector<uint32_t>& own : stages) {
    double later = more_of_one_input(policy, own);
    for (size_t k = own.size(); k-- > 0 && policy.order.empty();) {
      free_[own[k]] = later;
      later += policy.weights[own[k]];
    }
    if (policy.shares) {
      share(shape, own);
    }
  }
}

// In units of one hop, an activation of stage s lives until the microbatch has
// gone to the last stage and its gradient has come back.
void ListRoom::share(const Schedule& shape, const std::vector<uint32_t>& own) {
  const auto life = [&](uint32_t s) {
    return 2.0 * (shape.stages - 1 - s) + 1;
  };
  double lives = 0;
  for (const uint32_t s : own) {
    lives += life(s) * policy_.weights[s];
  }
  if (lives <= 0) {
    return; // what takes no room needs no share of it
  }
  for (const uint32_t s : own) {
    const double wanted = policy_.budgets[ranks_[s]] * life(s) / lives;
    const double most =
        std::ceil(std::min<double>(wanted, shape.microbatches) - 1e-9);
    most_[s] = std::max(1u, static_cast<uint32_t>(most));
  }
}

bool ListRoom::fits(uint32_t rank, double more) const {
  return held_[rank] + more <= policy_.budgets[rank] * (1 + 1e-12);
}

bool ListRoom::for_forward(uint32_t stage, uint32_t in_flight) const {
  return in_flight < most_[stage] &&
         fits(ranks_[stage], policy_.weights[stage] + free_[stage]);
}

bool ListRoom::for_input(uint32_t stage) const {
  const double released = policy_.released[stage];
  return released >= 0 || fits(ranks_[stage], -released);
}

void ListRoom::forward(uint32_t stage) {
  held_[ranks_[stage]] += policy_.weights[stage];
}

void ListRoom::input(uint32_t stage) {
  held_[ranks_[stage]] -= policy_.released[stage];
}

void ListRoom::weight(uint32_t stage) {
  held_[ranks_[stage]] -= policy_.weights[stage] - policy_.released[stage];
}

double more_of_one_input(
    const ListPolicy& policy,
    const std::vector<uint32_t>& stages) {
  double most = 0;
  for (const uint32_t s : stages) {
    most = std::max(most, -policy.released[s]);
  }
  return most;
}

} // namespace torch_sm3::pipeline
