// SPDX-License-Identifier: Apache-2.0
// What the ranks of a runner compare before they begin.
#include <runtime/runner_impl.h>

#include <torch_sm3/check.h>
#include <torch_sm3/library.h>

#include <algorithm>
#include <iomanip>
#include <sstream>

namespace torch_sm3::pipeline {
namespace {

// FNV-1a: equal on all machines.
std::string digest(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char letter : text) {
    hash = (hash ^ static_cast<uint8_t>(letter)) * 0x100000001b3u;
  }
  std::ostringstream out;
  out << std::hex << std::setw(16) << std::setfill('0') << hash;
  return out.str();
}

const char* name(LossReduction reduction) {
  switch (reduction) {
    case LossReduction::kMean:
      return "mean";
    case LossReduction::kSamples:
      return "samples";
    case LossReduction::kSum:
      return "sum";
  }
  return "unknown";
}

// What must be equal on all ranks, by the name of the argument.
std::vector<std::pair<std::string, std::string>>
record_of(const Schedule& schedule, const RunnerOptions& options) {
  return {
      {"schedule",
       c10::str(
           schedule.kind,
           " of ",
           schedule.ranks,
           " ranks and ",
           schedule.microbatches,
           " microbatches (",
           digest(schedule.text()),
           ")")},
      {"loss_reduction", name(options.loss_reduction)},
      {"batch_dim", c10::str(options.batch_dim)},
      {"timeout", c10::str(options.timeout)},
      {"max_pending", c10::str(options.max_pending)}};
}

void check_stages(
    int64_t rank,
    const Schedule& schedule,
    const std::vector<Stage>& stages) {
  std::vector<int64_t> own;
  for (uint32_t stage = 0; stage < schedule.stages; ++stage) {
    if (schedule.placement[stage] == rank) {
      own.push_back(stage);
    }
  }
  std::vector<int64_t> given;
  for (const Stage& stage : stages) {
    given.push_back(stage.index());
  }
  std::sort(given.begin(), given.end());
  TORCH_SM3_CHECK_VALUE(
      given == own,
      "PipelineRunner",
      "stages",
      c10::str("the stages ", own, ", each once"),
      given);
  for (const Stage& stage : stages) {
    for (const auto& [key, target] : stage.routes()) {
      TORCH_SM3_CHECK_VALUE(
          target < schedule.stages,
          "PipelineRunner",
          "stages",
          c10::str("a route to a stage below ", schedule.stages),
          target);
    }
  }
}

void check(
    int64_t rank,
    int64_t ranks,
    const Schedule& schedule,
    const std::vector<Stage>& stages,
    const RunnerOptions& options) {
  TORCH_SM3_CHECK_VALUE(
      schedule.ranks == ranks,
      "PipelineRunner",
      "schedule",
      c10::str("a schedule of ", ranks, " ranks"),
      schedule.ranks);
  check_stages(rank, schedule, stages);
  const RankProgram program(schedule, static_cast<uint32_t>(rank));
  TORCH_SM3_CHECK_VALUE(
      options.loss || !program.trains() || schedule.placement.back() != rank,
      "PipelineRunner",
      "options",
      "a loss for a schedule with backwards",
      "none");
  TORCH_SM3_CHECK_VALUE(
      options.timeout > 0,
      "PipelineRunner",
      "options",
      "a timeout above 0 s",
      options.timeout);
  TORCH_SM3_CHECK_VALUE(
      options.max_pending >= 1,
      "PipelineRunner",
      "options",
      "max_pending of at least 1",
      options.max_pending);
}

std::vector<Route> routes_of(const std::vector<Stage>& stages) {
  std::vector<Route> routes;
  for (const Stage& stage : stages) {
    for (const auto& [key, target] : stage.routes()) {
      routes.push_back(
          {static_cast<uint16_t>(stage.index()),
           static_cast<uint16_t>(target)});
    }
  }
  return routes;
}

// A record as it travels: the problem or None, routes, then names and values.
c10::IValue value_of(
    const c10::IValue& problem,
    const std::vector<Route>& routes,
    const std::vector<std::pair<std::string, std::string>>& record) {
  std::vector<c10::IValue> items{problem};
  std::vector<c10::IValue> ways;
  for (const Route route : routes) {
    ways.push_back(
        c10::ivalue::Tuple::create(
            {int64_t{route.source}, int64_t{route.target}}));
  }
  items.push_back(c10::ivalue::Tuple::create(std::move(ways)));
  for (const auto& [argument, value] : record) {
    items.push_back(c10::ivalue::Tuple::create({argument, value}));
  }
  return c10::ivalue::Tuple::create(std::move(items));
}

std::vector<c10::IValue> items_of(const c10::IValue& tuple) {
  return tuple.toTupleRef().elements().vec();
}

void compare(const std::vector<c10::IValue>& records) {
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const c10::IValue problem = items_of(records[rank]).at(0);
    TORCH_CHECK_VALUE(
        problem.isNone(),
        problem.isNone() ? "" : problem.toStringRef(),
        records.size() > 1 ? c10::str(", on rank ", rank) : "");
  }
  const auto first = items_of(records.front());
  for (size_t rank = 1; rank < records.size(); ++rank) {
    const auto other = items_of(records[rank]);
    for (size_t i = 2; i < first.size(); ++i) {
      const auto theirs = items_of(first[i]);
      const auto mine = items_of(other.at(i));
      TORCH_CHECK_VALUE(
          theirs == mine,
          "PipelineRunner: expected ",
          theirs.at(1).toStringRef(),
          " as on rank 0, but got ",
          mine.at(1).toStringRef(),
          " on rank ",
          rank,
          " (argument '",
          mine.at(0).toStringRef(),
          "')");
    }
  }
}

std::vector<Route> all_routes(const std::vector<c10::IValue>& records) {
  std::vector<Route> routes;
  for (const c10::IValue& record : records) {
    for (const c10::IValue& way : items_of(items_of(record).at(1))) {
      const auto ends = items_of(way);
      routes.push_back(
          {static_cast<uint16_t>(ends.at(0).toInt()),
           static_cast<uint16_t>(ends.at(1).toInt())});
    }
  }
  std::sort(routes.begin(), routes.end());
  routes.erase(std::unique(routes.begin(), routes.end()), routes.end());
  return routes;
}

} // namespace

Schedule agree(
    Transport* transport,
    int64_t rank,
    int64_t ranks,
    const Schedule& schedule,
    const std::vector<Stage>& stages,
    const RunnerOptions& options) {
  c10::IValue problem;
  try {
    check(rank, ranks, schedule, stages, options);
  } catch (const std::exception& error) {
    problem = text_of(error);
  }
  const auto records = exchange(
      transport,
      rank,
      ranks,
      value_of(problem, routes_of(stages), record_of(schedule, options)));
  compare(records);
  Schedule whole = schedule;
  const std::vector<Route> routes = all_routes(records);
  if (!schedule.lowered()) {
    whole.routes = routes;
  }
  TORCH_SM3_CHECK_VALUE(
      whole.routes == routes,
      "PipelineRunner",
      "schedule",
      c10::str("the ", routes.size(), " routes of the stages"),
      c10::str(whole.routes.size(), " others"));
  return whole.lower();
}

} // namespace torch_sm3::pipeline
