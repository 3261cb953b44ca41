// SPDX-License-Identifier: Apache-2.0
// What the ranks of a runner compare before they begin.
#include <runtime/runner_impl.h>

#include <torch_sm3/check.h>
#include <torch_sm3/pipeline/verifier.h>

#include <algorithm>
#include <iomanip>
#include <map>
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

std::string delays(const RunnerOptions& options) {
  std::string text;
  for (const auto& [link, seconds] : options.link_delay) {
    text += c10::str(
        text.empty() ? "" : ", ", link.first, ">", link.second, ": ", seconds);
  }
  return "{" + text + "}";
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
  TORCH_SM3_CHECK_VALUE(
      !options.hook || options.data_parallel,
      "PipelineRunner",
      "options",
      "data_parallel, the group of the hook's ranks",
      "none");
  for (const auto& [link, seconds] : options.link_delay) {
    TORCH_SM3_CHECK_VALUE(
        std::min(link.first, link.second) >= 0 &&
            std::max(link.first, link.second) < ranks && seconds >= 0,
        "PipelineRunner",
        "options",
        c10::str("link_delay of seconds for pairs of ", ranks, " ranks"),
        delays(options));
  }
}

// A deterministic run adds contributions in microbatch order.
void check_order(const Schedule& schedule) {
  for (const auto& row : schedule.rows) {
    std::map<std::pair<Op, uint16_t>, Action> latest;
    for (const Action action : row) {
      if (!is_compute(action.op) || action.op == Op::kForward) {
        continue;
      }
      const auto [found, fresh] =
          latest.emplace(std::pair(action.op, action.stage), action);
      if (!fresh && found->second.microbatch > action.microbatch) {
        throw ScheduleError(
            "PipelineRunner: expected backwards in microbatch order for a "
            "deterministic run, but got " +
            schedule.text(action) + " after " + schedule.text(found->second) +
            " (argument 'schedule')");
      }
      found->second = action;
    }
  }
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

// The schedule with the routes and ties of the stages, as far as it can still
// be given any.
Schedule completed(
    const Schedule& schedule,
    std::vector<Route> routes,
    const Members& members) {
  std::vector<std::vector<uint16_t>> ties;
  for (const auto& [name, all] : members) {
    if (stages_of(all).size() > 1) {
      ties.push_back(stages_of(all));
    }
  }
  std::sort(ties.begin(), ties.end());
  auto known = schedule.ties;
  std::sort(known.begin(), known.end());
  // Without messages a schedule may leave some out, but not know others.
  const bool complete = schedule.lowered();
  const auto fits = [&](const auto& declared, const auto& given) {
    return complete ? declared == given
                    : std::includes(
                          given.begin(),
                          given.end(),
                          declared.begin(),
                          declared.end());
  };
  TORCH_SM3_CHECK_VALUE(
      fits(schedule.routes, routes),
      "PipelineRunner",
      "schedule",
      c10::str("the ", routes.size(), " routes of the stages"),
      c10::str(schedule.routes.size(), " others"));
  TORCH_SM3_CHECK_VALUE(
      fits(known, ties),
      "PipelineRunner",
      "schedule",
      c10::str("the ", ties.size(), " tied weights of the stages"),
      c10::str(known.size(), " others"));
  return complete ? schedule
                  : schedule.with_routes(std::move(routes), std::move(ties));
}

// Tied weights in the order in which a schedule numbers them; those of a single
// stage, which no schedule knows, come last.
std::vector<std::vector<Member>>
numbered(Members members, const std::vector<std::vector<uint16_t>>& known) {
  std::vector<std::vector<Member>> ties;
  for (const auto& stages : known) {
    const auto found =
        std::find_if(members.begin(), members.end(), [&](const auto& entry) {
          return stages_of(entry.second) == stages;
        });
    ties.push_back(std::move(found->second));
    members.erase(found);
  }
  for (auto& entry : members) {
    ties.push_back(std::move(entry.second));
  }
  return ties;
}

// Adds the reductions that the row of a rank leaves out, at its end.
void add_collectives(Agreement* known, int64_t rank) {
  std::vector<Action>& row = known->schedule.rows.at(static_cast<size_t>(rank));
  const auto has = [&](Op op, int64_t stage, uint32_t number) {
    return std::any_of(row.begin(), row.end(), [&](Action action) {
      return action.op == op &&
             (op == Op::kTieReduce ? action.microbatch == number
                                   : action.stage == stage);
    });
  };
  for (uint32_t number = 0; number < known->ties.size(); ++number) {
    for (const Member& member : known->ties[number]) {
      if (member.rank == rank && !has(Op::kTieReduce, 0, number)) {
        row.push_back(
            {Op::kTieReduce, 0, static_cast<uint16_t>(member.stage), number});
      }
    }
  }
  // In the order of their last weight gradients.
  std::vector<uint16_t> late;
  for (auto action = row.rbegin(); action != row.rend(); ++action) {
    if (gives_weight_gradient(action->op) &&
        std::find(late.begin(), late.end(), action->stage) == late.end()) {
      late.push_back(action->stage);
    }
  }
  for (auto stage = late.rbegin(); stage != late.rend(); ++stage) {
    if (!has(Op::kReduceGrad, *stage, 0)) {
      row.push_back({Op::kReduceGrad, 0, *stage, 0});
    }
  }
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
    check_order(known.schedule);
  }
  known.ties = numbered(std::move(members), known.schedule.ties);
  if (RankProgram(known.schedule, static_cast<uint32_t>(rank)).trains()) {
    add_collectives(&known, rank);
  }
  return known;
}

} // namespace torch_sm3::pipeline
