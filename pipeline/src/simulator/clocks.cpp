// SPDX-License-Identifier: Apache-2.0
#include <simulator/clocks.h>

namespace torch_sm3::pipeline {
namespace {

// One entry for all, by sender, or by sender and receiver.
double
of_link(const std::vector<double>& values, size_t ranks, const Edge& edge) {
  if (values.size() == 1) {
    return values[0];
  }
  return values.size() == ranks ? values[edge.from]
                                : values[edge.from * ranks + edge.to];
}

// SplitMix64 (Steele, Lea and Flood, 2014).
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

} // namespace

double hop(const Schedule& schedule, const Costs& costs, const Edge& edge) {
  const double bandwidth = of_link(costs.bandwidth, schedule.ranks, edge);
  const double bytes =
      edge.flags > 0
          ? costs.of_route(edge.flags - 1u)
          : costs.of(std::min(edge.source, edge.target)).boundary_bytes;
  return of_link(costs.latency, schedule.ranks, edge) +
         (bandwidth > 0 ? bytes / bandwidth : 0);
}

Clocks::Clocks(const Program& program, const Costs& costs, bool with_timeline)
    : program_(program),
      costs_(costs),
      with_timeline_(with_timeline),
      ranks_(program.schedule().ranks),
      timeline_(with_timeline ? program.schedule().ranks : 0),
      durations_(size_t{4} * program.schedule().stages),
      optimizers_(program.schedule().ranks),
      hops_(program.edges().size()),
      arrivals_(program.slots()),
      posts_(program.channels()),
      wires_(program.links()),
      starts_(program.schedule().ties.size() + 1) {
  const Schedule& schedule = program.schedule();
  for (uint32_t stage = 0; stage < schedule.stages; ++stage) {
    const uint32_t rank = schedule.placement[stage];
    const StageCosts& of = costs.of(stage);
    const auto set = [&](size_t row, double cost) {
      durations_[row * schedule.stages + stage] = cost / costs.of_rank(rank);
    };
    set(0, of.forward);
    set(1, of.full_backward());
    set(2, of.input_gradient());
    set(3, of.weight);
    optimizers_[rank] += of.optimizer;
  }
  for (size_t i = 0; i < hops_.size(); ++i) {
    const Edge& edge = program.edges()[i];
    hops_[i] = edge.crosses ? hop(schedule, costs, edge) : 0;
  }
  for (uint32_t rank = 0; with_timeline && rank < schedule.ranks; ++rank) {
    timeline_[rank].reserve(schedule.rows[rank].size());
  }
}

// A number in [0, 1) of what names the action.
double Clocks::chance(Action action) const {
  const uint64_t row =
      static_cast<uint64_t>(action.op) - static_cast<uint64_t>(Op::kForward);
  const uint64_t name =
      (row << 48) + (uint64_t{action.stage} << 32) + action.microbatch;
  return static_cast<double>(mix(costs_.seed + mix(name)) >> 11) * 0x1p-53;
}

void Clocks::send(
    uint32_t rank,
    Action action,
    uint32_t edge,
    size_t slot,
    bool waits) {
  const Edge& on = program_.edges()[edge];
  Rank& sender = ranks_[rank];
  sender.begun = sender.clock;
  const bool early = sender.half_open && action.op == Op::kSendForward &&
                     action.stage == sender.half.stage &&
                     action.microbatch == sender.half.microbatch;
  double start = early ? sender.half_end : sender.clock;
  if (waits) {
    const double free = posts_[on.channel].pop();
    start = std::max(start, free);
    sender.clock = std::max(sender.clock, free);
  }
  if (costs_.serial_links) {
    start = std::max(start, wires_[on.link]);
  }
  arrivals_[slot] = wires_[on.link] = start + hops_[edge];
}

void Clocks::meet(uint32_t rank, size_t collective, Action action) {
  const double cost = action.op == Op::kOptimizer
                          ? optimizers_[rank] / costs_.of_rank(rank)
                          : costs_.tie[costs_.tie.size() == 1 ? 0 : collective];
  spend(rank, starts_[collective], cost, action.op);
}

void Clocks::other(uint32_t rank, Action action) {
  double cost = 0;
  if (action.op == Op::kReduceGrad) {
    cost = costs_.of(action.stage).reduce;
  } else if (action.op == Op::kOptimizer) {
    cost = optimizers_[rank] / costs_.of_rank(rank);
  }
  spend(rank, ranks_[rank].clock, cost, action.op);
}

} // namespace torch_sm3::pipeline
