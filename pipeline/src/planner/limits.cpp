// SPDX-License-Identifier: Apache-2.0
// What takes a look at the finished schedule: memory limits, and groups that
// the caller forced upon interleaved.
#include <planner/planning.h>

#include <simulator/check_costs.h>
#include <torch_sm3/pipeline/simulator.h>
#include <torch_sm3/pipeline/verifier.h>

#include <algorithm>
#include <cmath>

namespace torch_sm3::pipeline {
namespace {

std::vector<double> peaks_of(const PlanOptions& options, const Schedule& plan) {
  VerifyOptions checks;
  checks.links = held_links(options);
  checks.costs = *options.costs;
  const Report report = verify(plan, checks);
  report.raise_if_invalid();
  return report.peak_bytes;
}

// Throws ScheduleError for the rank that lacks most if any is above its limit.
void check_peaks(const PlanOptions& options, const std::vector<double>& peaks) {
  size_t worst = 0;
  for (size_t rank = 1; rank < peaks.size(); ++rank) {
    if (peaks[rank] - limit_of(options.memory_limit, rank) >
        peaks[worst] - limit_of(options.memory_limit, worst)) {
      worst = rank;
    }
  }
  if (peaks[worst] > limit_of(options.memory_limit, worst)) {
    throw ScheduleError(
        "plan: expected a memory limit of at least " +
        short_number(peaks[worst]) + " bytes on rank " + std::to_string(worst) +
        " for kind " + options.kind + ", but got " +
        short_number(limit_of(options.memory_limit, worst)) +
        " (argument 'memory_limit')");
  }
}

void check_group(const PlanOptions& options, const Report& report) {
  if (!report.valid()) {
    throw ScheduleError(
        "plan: expected a group size whose order can run, but got " +
        std::to_string(options.group_size) + " (argument 'group_size'); " +
        report.message + "\n" + report.grid);
  }
}

// Warm-up forwards to give up for this many bytes: never more than needed,
// since each holds an activation and at most one message each way.
uint32_t too_many(double excess, const StageCosts& stage) {
  const double each = stage.activation_bytes + 2 * stage.boundary_bytes;
  const double count = each > 0 ? std::floor(excess / each) : 0;
  return static_cast<uint32_t>(std::clamp(count, 1.0, 1e9));
}

// Lowers the warm-up where a rank is above its limit; false if nothing can be
// lowered. What has no warm-up left may hold what ranks before it send so
// early, and a rank cannot warm up longer than the one before it, which feeds
// it.
bool lower_warmups(
    const PlanOptions& options,
    const std::vector<double>& peaks,
    std::vector<uint32_t>* warmups) {
  const std::vector<uint32_t> before = *warmups;
  for (uint32_t rank = 0; rank < peaks.size(); ++rank) {
    const double excess = peaks[rank] - limit_of(options.memory_limit, rank);
    uint32_t source = rank;
    while (source > 0 && before[source] == 0) {
      --source;
    }
    uint32_t& warmup = (*warmups)[source];
    if (excess > 0 && warmup > 0 && warmup == before[source]) {
      const StageCosts& stage = options.costs->of(rank);
      warmup -= source < rank ? 1 : std::min(warmup, too_many(excess, stage));
    }
    if (rank > 0) {
      (*warmups)[rank] = std::min((*warmups)[rank], (*warmups)[rank - 1]);
    }
  }
  return *warmups != before;
}

Schedule fit_1f1b(const PlanOptions& options, Schedule schedule) {
  const RankRange all{0, schedule.ranks};
  const Sizes sizes{schedule.ranks, 1, schedule.microbatches};
  std::vector<uint32_t> warmups = warmups_1f1b(options, all);
  std::vector<double> peaks = peaks_of(options, schedule);
  while (lower_warmups(options, peaks, &warmups)) {
    schedule.rows = alternating_rows(sizes, all, warmups);
    peaks = peaks_of(options, schedule);
  }
  check_peaks(options, peaks);
  return schedule;
}

} // namespace

LinkModel held_links(const PlanOptions& options) {
  return {Links::kRendezvous, options.max_pending};
}

bool needs_whole(const PlanOptions& options) {
  const bool forced = options.kind == "interleaved" && options.group_size > 0;
  return forced || !options.memory_limit.empty();
}

Schedule settle(const PlanOptions& options, Schedule schedule) {
  if (options.kind == "interleaved" && options.group_size > 0) {
    check_group(options, verify(schedule));
  }
  if (options.memory_limit.empty()) {
    return schedule;
  }
  if (options.kind == "1f1b") {
    return fit_1f1b(options, std::move(schedule));
  }
  check_peaks(options, peaks_of(options, schedule));
  return schedule;
}

std::string advice(const PlanOptions& options) {
  if (options.kind != "interleaved" || options.group_size == 0) {
    return "";
  }
  PlanOptions automatic = options;
  automatic.group_size = 0;
  const auto bubble = [](PlanOptions of) {
    of.memory_limit
        .clear(); // what the other one would hold is beside the point
    const Schedule schedule = plan(of);
    Costs costs = of.costs.value_or(Costs{});
    if (!of.costs) {
      // One unit each of F, I and W per rank, whatever the number of chunks.
      const double share =
          static_cast<double>(schedule.ranks) / schedule.stages;
      StageCosts& stage = costs.stages[0];
      stage.forward = stage.input = stage.weight = share;
    }
    const Simulation run = simulate(schedule, costs);
    return run.makespan - *std::max_element(run.busy.begin(), run.busy.end());
  };
  const double forced = bubble(options);
  const double best = bubble(automatic);
  if (forced <= best * (1 + 1e-9)) {
    return "";
  }
  const auto group = automatic_group(
      static_cast<uint32_t>(options.ranks),
      static_cast<uint32_t>(options.microbatches));
  return "plan: group_size " + std::to_string(options.group_size) +
         " leaves a bubble of " + short_number(forced) + ", group_size " +
         std::to_string(group) + " one of " + short_number(best);
}

} // namespace torch_sm3::pipeline
