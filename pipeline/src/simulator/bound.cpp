// SPDX-License-Identifier: Apache-2.0
#include <simulator/bound.h>

#include <limits>

namespace torch_sm3::pipeline {
namespace {

// Shortest times of the actions of each stage; an action that is half of a
// fused pair may take no longer than the pair.
struct Shortest {
  std::vector<double> forward;
  std::vector<double> backward; // up to the gradient of the inputs
  bool training = false;
};

Shortest shortest(const Program& program, const Costs& costs) {
  const Schedule& schedule = program.schedule();
  Shortest times;
  std::vector<uint8_t> split(schedule.stages);
  double pair = std::numeric_limits<double>::infinity();
  for (const auto& row : schedule.rows) {
    for (const Action action : row) {
      if (!is_compute(action.op)) {
        continue;
      }
      times.training |= action.op != Op::kForward;
      split[action.stage] |= action.op == Op::kBackwardInput ? 1 : 0;
      split[action.stage] |= action.op == Op::kBackward ? 2 : 0;
      if ((action.flags & kPaired) != 0) {
        pair = std::min(pair, costs.of(action.stage).pair.value_or(pair));
      }
    }
  }
  for (uint32_t stage = 0; stage < schedule.stages; ++stage) {
    const StageCosts& of = costs.of(stage);
    const double speed = costs.of_rank(schedule.placement[stage]);
    const double backward =
        split[stage] == 1   ? of.input_gradient()
        : split[stage] == 2 ? of.full_backward()
                            : std::min(of.input_gradient(), of.full_backward());
    times.forward.push_back(std::min(of.forward, pair) / speed);
    times.backward.push_back(std::min(backward, pair) / speed);
  }
  return times;
}

} // namespace

double lower_bound(
    const Program& program,
    const Costs& costs,
    const std::vector<Clocks::Rank>& ranks) {
  const Schedule& schedule = program.schedule();
  const Shortest times = shortest(program, costs);
  constexpr double kFar = std::numeric_limits<double>::infinity();
  // By rank: the least time before any of its actions, and after all of them
  // but weight gradients and collectives.
  std::vector<double> before(schedule.ranks, kFar);
  std::vector<double> after(schedule.ranks, kFar);
  const auto way = [&](uint32_t index) {
    const Edge& edge = program.edges()[index];
    return edge.crosses ? hop(schedule, costs, edge) : 0;
  };
  const auto visit = [&](std::vector<double>* of, uint32_t stage, double time) {
    double& least = (*of)[schedule.placement[stage]];
    least = std::min(least, time);
  };
  double time = 0;
  for (uint32_t stage = 0; stage < schedule.stages; ++stage) {
    time += stage > 0 ? way(stage) : 0;
    visit(&before, stage, time);
    time += times.forward[stage];
  }
  time = 0;
  if (times.training) {
    for (uint32_t stage = 0; stage < schedule.stages; ++stage) {
      visit(&after, stage, time);
      time += times.backward[stage] + way(schedule.stages + stage);
    }
  } else {
    for (uint32_t stage = schedule.stages; stage-- > 0;) {
      visit(&after, stage, time);
      time += times.forward[stage] + way(stage);
    }
  }
  double bound = 0;
  for (uint32_t rank = 0; rank < schedule.ranks; ++rank) {
    if (before[rank] == kFar) {
      continue; // no stage is here
    }
    const double first = ranks[rank].busy - ranks[rank].weights + after[rank];
    bound = std::max(bound, before[rank] + std::max(ranks[rank].busy, first));
  }
  return bound;
}

} // namespace torch_sm3::pipeline
