// SPDX-License-Identifier: Apache-2.0
#include <schedule/inventory.h>

#include <algorithm>

namespace torch_sm3::pipeline {

Inventory::Inventory(const Schedule& schedule)
    : computed(size_t{2} * schedule.stages),
      weights(schedule.stages),
      reduced(schedule.stages),
      tied(schedule.ties.size()),
      optimized(schedule.ranks) {
  for (uint32_t rank = 0; rank < schedule.ranks; ++rank) {
    for (const Action action : schedule.rows[rank]) {
      note(schedule, rank, action);
    }
  }
}

void Inventory::note(const Schedule& schedule, uint32_t rank, Action action) {
  if (is_message(action.op)) {
    messages = true;
  } else if (is_compute(action.op)) {
    if (action.op == Op::kForward) {
      computed[action.stage] = true;
    } else if (gives_input_gradient(action.op)) {
      computed[schedule.stages + action.stage] = true;
    }
    if (gives_weight_gradient(action.op)) {
      training = weights[action.stage] = true;
    }
  } else if (action.op == Op::kReduceGrad) {
    reduced[action.stage] = true;
  } else if (action.op == Op::kTieReduce) {
    tied[action.microbatch] = true;
  } else if (action.op == Op::kOptimizer) {
    optimized[rank] = true;
  }
}

// Whether two stages on different ranks compute what one sends the other.
bool Inventory::needs_messages(const Schedule& schedule) const {
  const auto crosses = [&](size_t source, size_t target) {
    if (schedule.placement[source] == schedule.placement[target]) {
      return false;
    }
    const size_t back = schedule.stages;
    return (computed[source] && computed[target]) ||
           (computed[back + source] && computed[back + target]);
  };
  for (size_t stage = 0; stage + 1 < schedule.stages; ++stage) {
    if (crosses(stage, stage + 1)) {
      return true;
    }
  }
  return std::any_of(
      schedule.routes.begin(), schedule.routes.end(), [&](Route route) {
        return crosses(route.source, route.target);
      });
}

bool Inventory::complete(const Schedule& schedule) const {
  if (!messages && needs_messages(schedule)) {
    return false;
  }
  for (size_t stage = 0; stage < schedule.stages; ++stage) {
    if (weights[stage] && !reduced[stage]) {
      return false;
    }
  }
  for (size_t tie = 0; tie < schedule.ties.size(); ++tie) {
    const auto& members = schedule.ties[tie];
    const bool trained =
        std::any_of(members.begin(), members.end(), [&](uint16_t stage) {
          return weights[stage];
        });
    if (trained && !tied[tie]) {
      return false;
    }
  }
  return !training || std::find(optimized.begin(), optimized.end(), false) ==
                          optimized.end();
}

} // namespace torch_sm3::pipeline
