// SPDX-License-Identifier: Apache-2.0
// What the ranks of a runner compare before they begin.
#include <runtime/agree.h>
#include <runtime/control.h>
#include <runtime/rank_program.h>

#include <torch_sm3/check.h>
#include <torch_sm3/pipeline/verifier.h>

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
    case LossReduction::kTokens:
      return "tokens";
  }
  return "unknown";
}

const char* name(Reduce reduce) {
  switch (reduce) {
    case Reduce::kMean:
      return "mean";
    case Reduce::kSum:
      return "sum";
    case Reduce::kAdasum:
      return "adasum";
    case Reduce::kNone:
      return "none";
  }
  return "unknown";
}

// Of the library, which may differ from machine to machine.
std::string version() {
  const std::string info = build_info();
  const std::string key = "\"version\": \"";
  const size_t start = info.find(key) + key.size();
  return info.substr(start, info.find('"', start) - start);
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
      {"torch_sm3", version()},
      {"loss_reduction", name(options.loss_reduction)},
      {"batch_dim", c10::str(options.batch_dim)},
      {"timeout", c10::str(options.timeout)},
      {"max_pending", c10::str(options.max_pending)},
      {"link_delay", delays(options)},
      {"data_parallel", options.data_parallel ? "a group" : "none"},
      {"reduce", name(options.reduce)},
      {"hook", options.hook ? "a hook" : "none"},
      {"deterministic", options.deterministic ? "true" : "false"},
      {"seed", c10::str(options.seed)},
      {"share_loss", options.share_loss ? "true" : "false"}};
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

// A record as it travels: the problem or None, routes, ties, then names and
// values.
c10::IValue value_of(
    const c10::IValue& problem,
    const std::vector<Route>& routes,
    const Members& ties,
    const std::vector<std::pair<std::string, std::string>>& record) {
  std::vector<c10::IValue> items{problem};
  std::vector<c10::IValue> ways;
  for (const Route route : routes) {
    ways.push_back(
        c10::ivalue::Tuple::create(
            {int64_t{route.source}, int64_t{route.target}}));
  }
  items.push_back(c10::ivalue::Tuple::create(std::move(ways)));
  std::vector<c10::IValue> members;
  for (const auto& [name, all] : ties) {
    for (const Member& member : all) {
      members.push_back(
          c10::ivalue::Tuple::create(
              {name, member.stage, member.rank, member.shape}));
    }
  }
  items.push_back(c10::ivalue::Tuple::create(std::move(members)));
  for (const auto& [argument, value] : record) {
    items.push_back(c10::ivalue::Tuple::create({argument, value}));
  }
  return c10::ivalue::Tuple::create(std::move(items));
}

std::vector<c10::IValue> items_of(const c10::IValue& tuple) {
  return tuple.toTupleRef().elements().vec();
}

constexpr size_t kFirstOption = 3;

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
    for (size_t i = kFirstOption; i < first.size(); ++i) {
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

// The members of all tied weights; those of this rank with their weights.
Members all_members(
    const std::vector<c10::IValue>& records,
    const Members& own,
    int64_t rank) {
  std::vector<Members> all;
  for (const c10::IValue& record : records) {
    if (all.size() == static_cast<size_t>(rank)) {
      all.push_back(own);
      continue;
    }
    Members theirs;
    for (const c10::IValue& item : items_of(items_of(record).at(2))) {
      const auto fields = items_of(item);
      theirs[fields.at(0).toStringRef()].push_back(
          {fields.at(1).toInt(),
           fields.at(2).toInt(),
           fields.at(3).toStringRef(),
           {}});
    }
    all.push_back(std::move(theirs));
  }
  return combined(all);
}

} // namespace

Agreement agree(
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
  const Members own = members_of(stages, rank);
  const auto records = exchange(
      transport,
      rank,
      ranks,
      value_of(problem, routes_of(stages), own, record_of(schedule, options)));
  compare(records);
  Members members = all_members(records, own, rank);
  Agreement known;
  known.schedule = completed(schedule, all_routes(records), members).lower();
  VerifyOptions rules;
  rules.links.max_pending = options.max_pending;
  verify(known.schedule, rules).raise_if_invalid();
  if (options.deterministic) {
    check_backward_order(known.schedule);
  }
  known.ties = numbered(std::move(members), known.schedule.ties);
  if (RankProgram(known.schedule, static_cast<uint32_t>(rank)).trains()) {
    add_collectives(&known, rank);
  }
  return known;
}

} // namespace torch_sm3::pipeline
