// SPDX-License-Identifier: Apache-2.0
#include <schedule/cells.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

// Placements that have a name instead of a list.
const char* placement_name(const Schedule& schedule) {
  if (schedule.placement == loop_placement(schedule.ranks, schedule.stages)) {
    return "loop";
  }
  if (schedule.placement == v_placement(schedule.ranks, schedule.stages)) {
    return "v";
  }
  return nullptr;
}

template <class Number>
std::string joined(const std::vector<Number>& numbers, char separator) {
  std::string out;
  for (const Number number : numbers) {
    if (!out.empty()) {
      out.push_back(separator);
    }
    append(&out, number);
  }
  return out;
}

} // namespace

std::vector<uint32_t> loop_placement(uint32_t ranks, uint32_t stages) {
  std::vector<uint32_t> placement(stages);
  for (uint32_t stage = 0; stage < stages; ++stage) {
    placement[stage] = stage % ranks;
  }
  return placement;
}

std::vector<uint32_t> v_placement(uint32_t ranks, uint32_t stages) {
  std::vector<uint32_t> placement = loop_placement(ranks, stages);
  for (uint32_t stage = 0; stage < stages; ++stage) {
    if ((stage / ranks) % 2 == 1) {
      placement[stage] = ranks - 1 - placement[stage];
    }
  }
  return placement;
}

bool Schedule::lowered() const {
  return std::any_of(rows.begin(), rows.end(), [](const auto& row) {
    return std::any_of(row.begin(), row.end(), [](Action action) {
      return is_message(action.op) || action.op == Op::kReduceGrad ||
             action.op == Op::kTieReduce || action.op == Op::kOptimizer;
    });
  });
}

std::string head_of(const Schedule& schedule) {
  std::string out = "schedule 1 kind=" + schedule.kind +
                    " ranks=" + std::to_string(schedule.ranks) +
                    " stages=" + std::to_string(schedule.stages) +
                    " microbatches=" + std::to_string(schedule.microbatches) +
                    " placement=";
  if (const char* known = placement_name(schedule)) {
    out += known;
  } else {
    out += joined(schedule.placement, ',');
  }
  const char* separator = " routes=";
  for (const Route route : schedule.routes) {
    out += separator + std::to_string(route.source) + '>' +
           std::to_string(route.target);
    separator = ",";
  }
  separator = " ties=";
  for (const auto& members : schedule.ties) {
    out += separator + joined(members, '+');
    separator = ",";
  }
  return out;
}

std::string Schedule::text() const {
  std::string out = head_of(*this);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    out += "\nrank " + std::to_string(rank) + ":";
    for (size_t next = 0; next < rows[rank].size();) {
      out.push_back(' ');
      next = append_cell(&out, *this, rows[rank], next);
    }
  }
  out.push_back('\n');
  return out;
}

std::string Schedule::text(Action action) const {
  std::string out;
  append(&out, *this, action);
  return out;
}

void sort_routes(Schedule* schedule) {
  const auto check = [](bool fine, const std::string& expected, auto got) {
    if (!fine) {
      throw ScheduleError(
          "Schedule: expected " + expected + ", but got " + got());
    }
  };
  const std::string below = " below " + std::to_string(schedule->stages);
  auto& routes = schedule->routes;
  std::sort(routes.begin(), routes.end());
  check(
      routes.size() <= kMostRoutes,
      "at most " + std::to_string(kMostRoutes) + " routes",
      [&] { return std::to_string(routes.size()); });
  for (size_t i = 0; i < routes.size(); ++i) {
    const auto words = [&] {
      return joined(std::vector{routes[i].source, routes[i].target}, '>');
    };
    check(
        routes[i].source < routes[i].target &&
            routes[i].target < schedule->stages,
        "routes to a later stage" + below,
        words);
    check(i == 0 || routes[i - 1] != routes[i], "each route once", words);
  }
  for (auto& members : schedule->ties) {
    std::sort(members.begin(), members.end());
    check(
        members.size() >= 2 && members.back() < schedule->stages &&
            std::adjacent_find(members.begin(), members.end()) == members.end(),
        "ties of two or more stages" + below + ", each once",
        [&] { return members.empty() ? "none" : joined(members, '+'); });
  }
}

Schedule Schedule::with_routes(
    std::vector<Route> new_routes,
    std::vector<std::vector<uint16_t>> new_ties) const {
  if (lowered()) {
    throw ScheduleError(
        "Schedule.with_routes: expected a schedule that is not lowered, but "
        "got "
        "one with messages or collectives");
  }
  Schedule out = *this;
  out.routes = std::move(new_routes);
  out.ties = std::move(new_ties);
  sort_routes(&out);
  return out;
}

} // namespace torch_sm3::pipeline
