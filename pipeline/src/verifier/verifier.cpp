// SPDX-License-Identifier: Apache-2.0
#include <simulator/check_costs.h>
#include <verifier/lowered.h>
#include <verifier/memory.h>

#include <stdexcept>

namespace torch_sm3::pipeline {
namespace {

// Rule 6.
Report count_memory(const Program& program, const VerifyOptions& options) {
  const Schedule& schedule = program.schedule();
  Report report;
  report.peak_bytes.assign(schedule.ranks, 0);
  report.peak_at.assign(schedule.ranks, 0);
  report.peak_actions.resize(schedule.ranks);
  Memory memory(program, options.costs, options.links);
  for (uint32_t rank = 0; memory.counts() && rank < schedule.ranks; ++rank) {
    const Memory::Peak peak = memory.peak(rank);
    report.peak_bytes[rank] = peak.bytes;
    report.peak_at[rank] = peak.at;
    const auto& row = schedule.rows[rank];
    report.peak_actions[rank] = row.empty() ? "" : schedule.text(row[peak.at]);
    const double limit = limit_of(options.memory_limit, rank);
    if (report.valid() && peak.bytes > limit) {
      Report over = failed(
          schedule,
          {Rule::kMemory,
           "verify: expected at most " + short_number(limit) +
               " bytes on rank " + std::to_string(rank) + ", but got " +
               short_number(peak.bytes) +
               (row.empty() ? "" : " at " + report.peak_actions[rank]) +
               " (argument 'memory_limit')",
           rank,
           peak.at},
          options.full_grid);
      report.rule = over.rule;
      report.message = std::move(over.message);
      report.grid = std::move(over.grid);
      report.full_grid = std::move(over.full_grid);
    }
  }
  return report;
}

} // namespace

const char* name(Rule rule) {
  switch (rule) {
    case Rule::kNone:
      return "none";
    case Rule::kCounts:
      return "counts";
    case Rule::kDependencies:
      return "dependencies";
    case Rule::kMessages:
      return "messages";
    case Rule::kDeadlock:
      return "deadlock";
    case Rule::kCollectives:
      return "collectives";
    case Rule::kMemory:
      return "memory";
  }
  return "";
}

void Report::raise_if_invalid() const {
  if (!valid()) {
    throw ScheduleError(
        message + "\n" + (full_grid.empty() ? grid : full_grid));
  }
}

Report verify(const Schedule& schedule, const VerifyOptions& options) {
  check_links("verify", options.links);
  const Lowered lowered(schedule, options.full_grid);
  if (lowered.report()) {
    return *lowered.report();
  }
  const Program& program = lowered.program();
  check_costs("verify", program.schedule(), options.costs);
  check_limits("verify", options.memory_limit, schedule.ranks);
  if (!options.memory_limit.empty() && !has_bytes(options.costs)) {
    throw std::invalid_argument(
        "verify: expected bytes beside a memory limit, but got none "
        "(argument 'memory')");
  }
  if (auto report =
          find_stop(program, options.links, false, options.full_grid)) {
    return *report;
  }
  return count_memory(program, options);
}

std::vector<double> live_bytes(
    const Schedule& schedule,
    uint32_t rank,
    const Costs& costs,
    LinkModel links) {
  check_links("live_bytes", links);
  const Lowered lowered(schedule);
  if (lowered.report()) {
    lowered.report()->raise_if_invalid();
  }
  check_costs("live_bytes", schedule, costs);
  if (rank >= schedule.ranks) {
    throw std::invalid_argument(
        "live_bytes: expected a rank below " + std::to_string(schedule.ranks) +
        ", but got " + std::to_string(rank) + " (argument 'rank')");
  }
  return Memory(lowered.program(), costs, links).after(rank);
}

} // namespace torch_sm3::pipeline
