// SPDX-License-Identifier: Apache-2.0
#include <simulator/bound.h>
#include <simulator/check_costs.h>
#include <simulator/clocks.h>
#include <simulator/run.h>
#include <torch_sm3/pipeline/simulator.h>
#include <verifier/grid.h>
#include <verifier/lowered.h>
#include <verifier/memory.h>

namespace torch_sm3::pipeline {
namespace {

void run(const Program& program, LinkModel links, Clocks* clocks) {
  Greedy<Clocks> greedy(program, links, *clocks);
  if (!greedy.run()) {
    const Waiting found = waiting(program, greedy.stops(), false);
    throw ScheduleError(
        "simulate: expected an order in which nobody waits for ever, but got "
        "one where " +
        found.words + "\n" + grid(program.schedule(), found.marks, false));
  }
}

} // namespace

Simulation run_program(
    const Program& program,
    const Costs& costs,
    const LinkModel& links,
    bool with_timeline) {
  check_costs("simulate", program.schedule(), costs);
  Simulation result;
  Clocks clocks(program, costs, with_timeline);
  run(program, links, &clocks);
  for (const Clocks::Rank& rank : clocks.ranks()) {
    result.makespan = std::max(result.makespan, rank.last);
  }
  for (const Clocks::Rank& rank : clocks.ranks()) {
    result.busy.push_back(rank.busy);
    result.idle.push_back(result.makespan - rank.busy);
    result.own_idle.push_back(rank.last - rank.first - rank.busy);
  }
  result.lower_bound = lower_bound(program, costs, clocks.ranks());
  result.timeline = clocks.take_timeline();
  return result;
}

std::vector<double> peak_bytes_of(
    const Program& program,
    const Costs& costs,
    const LinkModel& links) {
  std::vector<double> peaks(program.schedule().ranks);
  Memory memory(program, costs, links);
  for (uint32_t rank = 0; memory.counts() && rank < peaks.size(); ++rank) {
    peaks[rank] = memory.peak(rank).bytes;
  }
  return peaks;
}

Simulation simulate(
    const Schedule& schedule,
    const Costs& costs,
    const LinkModel& links,
    bool with_timeline) {
  check_links("simulate", links);
  const Lowered lowered(schedule);
  if (lowered.report()) {
    lowered.report()->raise_if_invalid();
  }
  const Program& program = lowered.program();
  Simulation result = run_program(program, costs, links, with_timeline);
  result.peak_bytes = peak_bytes_of(program, costs, links);
  return result;
}

} // namespace torch_sm3::pipeline
