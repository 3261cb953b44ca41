// SPDX-License-Identifier: Apache-2.0
// What PipelineSchedule asks planner, verifier and simulator.
#include <classes/schedule_class.h>
#include <planner/planning.h>
#include <torch_sm3/check.h>
#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/search.h>
#include <torch_sm3/pipeline/simulator.h>
#include <torch_sm3/pipeline/verifier.h>

#include <stdexcept>

namespace torch_sm3::pipeline {
namespace {

// Throws std::invalid_argument.
LinkModel
links_of(const std::string& op, const std::string& links, int64_t max_pending) {
  LinkModel model;
  model.max_pending = max_pending;
  if (links == "posted") {
    model.links = Links::kPosted;
  } else if (links == "blocking") {
    model.links = Links::kBlocking;
  } else if (links != "rendezvous") {
    throw std::invalid_argument(
        op + ": expected links in {posted, rendezvous, blocking}, but got '" +
        links + "' (argument 'links')");
  }
  if (max_pending < 1) {
    throw std::invalid_argument(
        op + ": expected max_pending of at least 1, but got " +
        std::to_string(max_pending) + " (argument 'max_pending')");
  }
  return model;
}

Dialect dialect_of(const std::string& dialect) {
  TORCH_SM3_CHECK_VALUE(
      dialect == "torch_sm3" || dialect == "torch",
      "Schedule.to_csv",
      "dialect",
      "dialect in {torch_sm3, torch}",
      "'" + dialect + "'");
  return dialect == "torch" ? Dialect::kTorch : Dialect::kOwn;
}

struct Planned {
  Schedule schedule;
  CostsDict costs;
  std::vector<PipelineSchedule::Alternative> alternatives;
  std::string advice;
};

Planned plan_all(const PlanOptions& options) {
  Planned planned;
  if (options.kind == "auto") {
    Choice choice = search(options);
    planned.schedule = std::move(choice.schedule);
    planned.costs = dict_of(choice.costs);
    for (const Candidate& candidate : choice.alternatives) {
      planned.alternatives.emplace_back(
          candidate.plan,
          candidate.makespan,
          candidate.peak_bytes,
          candidate.refused,
          candidate.chosen);
    }
  } else {
    planned.schedule = plan(options);
    planned.advice = advice(options);
  }
  return planned;
}

Planned plan_row(const PlanOptions& options, int64_t rank) {
  check_rank(options, rank);
  const auto own = static_cast<size_t>(rank);
  Planned planned;
  if (options.kind == "auto") {
    // One search finds the row and what else there is to tell.
    planned = plan_all(options);
    std::vector<std::vector<Action>> rows(planned.schedule.ranks);
    rows[own] = std::move(planned.schedule.rows[own]);
    planned.schedule.rows = std::move(rows);
  } else {
    planned.schedule = outline(options);
    planned.schedule.rows[own] = plan_rank(options, rank);
    planned.advice = advice(options);
  }
  return planned;
}

} // namespace

std::tuple<
    c10::intrusive_ptr<PipelineSchedule>,
    CostsDict,
    std::vector<PipelineSchedule::Alternative>,
    std::string>
PipelineSchedule::plan_with(
    std::string kind,
    int64_t ranks,
    int64_t microbatches,
    int64_t chunks,
    int64_t group_size,
    const CostsDict& costs,
    double link_cost,
    std::vector<double> memory_limit,
    int64_t max_pending,
    int64_t split,
    std::string via,
    int64_t warmup,
    int64_t rank) {
  return as_value_error([&] {
    PlanOptions options;
    options.kind = std::move(kind);
    options.ranks = ranks;
    options.microbatches = microbatches;
    options.chunks = chunks;
    options.group_size = group_size;
    if (!costs.empty()) {
      options.costs = costs_of(costs);
    }
    options.link_cost = link_cost;
    options.memory_limit = std::move(memory_limit);
    options.max_pending = max_pending;
    options.split = split;
    options.via = std::move(via);
    options.warmup = warmup;
    Planned planned = rank < 0 ? plan_all(options) : plan_row(options, rank);
    return std::tuple(
        c10::make_intrusive<PipelineSchedule>(std::move(planned.schedule)),
        std::move(planned.costs),
        std::move(planned.alternatives),
        std::move(planned.advice));
  });
}

std::vector<std::string> PipelineSchedule::kinds() {
  return pipeline::kinds();
}

std::vector<int64_t> PipelineSchedule::partition(
    const std::vector<double>& costs,
    int64_t stages,
    const std::vector<double>& memory,
    double limit) {
  return as_value_error(
      [&] { return pipeline::partition(costs, stages, memory, limit); });
}

c10::intrusive_ptr<PipelineSchedule>
PipelineSchedule::from_csv(const std::string& text, const std::string& kind) {
  return c10::make_intrusive<PipelineSchedule>(
      as_value_error([&] { return Schedule::from_csv(text, kind); }));
}

std::string PipelineSchedule::to_csv(const std::string& dialect) const {
  return as_value_error([&] { return schedule_.to_csv(dialect_of(dialect)); });
}

std::tuple<
    std::string,
    std::string,
    std::string,
    std::string,
    std::vector<double>,
    std::vector<std::string>>
PipelineSchedule::verify(
    const std::string& links,
    int64_t max_pending,
    const CostsDict& memory,
    std::vector<double> memory_limit,
    bool full) const {
  Report report = as_value_error([&] {
    VerifyOptions options;
    options.links = links_of("verify", links, max_pending);
    options.costs = costs_of(memory);
    options.memory_limit = std::move(memory_limit);
    options.full_grid = full;
    return pipeline::verify(schedule_, options);
  });
  return {
      name(report.rule),
      std::move(report.message),
      std::move(report.grid),
      std::move(report.full_grid),
      std::move(report.peak_bytes),
      std::move(report.peak_actions)};
}

std::vector<double> PipelineSchedule::live_bytes(
    int64_t rank,
    const CostsDict& memory,
    const std::string& links,
    int64_t max_pending) const {
  return as_value_error([&] {
    if (rank < 0 || rank >= schedule_.ranks) {
      throw std::invalid_argument(
          "live_bytes: expected a rank from 0 to " +
          std::to_string(schedule_.ranks - 1) + ", but got " +
          std::to_string(rank) + " (argument 'rank')");
    }
    const LinkModel model = links_of("live_bytes", links, max_pending);
    return pipeline::live_bytes(
        schedule_, static_cast<uint32_t>(rank), costs_of(memory), model);
  });
}

std::tuple<
    double,
    std::vector<double>,
    std::vector<double>,
    std::vector<double>,
    std::vector<double>,
    double,
    std::vector<std::vector<double>>>
PipelineSchedule::simulate(
    const CostsDict& costs,
    const std::string& links,
    int64_t max_pending,
    bool with_timeline) const {
  Simulation found = as_value_error([&] {
    const LinkModel model = links_of("simulate", links, max_pending);
    return pipeline::simulate(schedule_, costs_of(costs), model, with_timeline);
  });
  std::vector<std::vector<double>> timeline;
  for (const auto& spans : found.timeline) {
    std::vector<double>& flat = timeline.emplace_back();
    flat.reserve(2 * spans.size());
    for (const Span span : spans) {
      flat.insert(flat.end(), {span.start, span.end});
    }
  }
  return {
      found.makespan,
      std::move(found.busy),
      std::move(found.idle),
      std::move(found.own_idle),
      std::move(found.peak_bytes),
      found.lower_bound,
      std::move(timeline)};
}

} // namespace torch_sm3::pipeline
