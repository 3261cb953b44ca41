// SPDX-License-Identifier: Apache-2.0
#include <schedule/inventory.h>
#include <verifier/greedy.h>
#include <verifier/grid.h>
#include <verifier/inspect.h>
#include <verifier/lowered.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

// A schedule as written may lack all its messages or all its collectives; one
// that has some of them and lacks others is wrong.
bool wants_lowering(const Schedule& schedule) {
  const Inventory held(schedule);
  const auto any = [](const std::vector<bool>& flags) {
    return std::find(flags.begin(), flags.end(), true) != flags.end();
  };
  const bool collectives =
      any(held.reduced) || any(held.tied) || any(held.optimized);
  return (!held.messages || !collectives) && !held.complete(schedule);
}

Report stuck(
    const Program& program,
    const std::vector<Stop>& stops,
    Rule rule,
    bool direct,
    bool full) {
  const Waiting found = waiting(program, stops, direct);
  Report report;
  report.rule = rule;
  report.message = std::string("verify: expected ") +
                   (rule == Rule::kDependencies
                        ? "dependencies without a cycle"
                        : "an order in which nobody waits for ever") +
                   ", but got one where " + found.words;
  report.grid = grid(program.schedule(), found.marks, false);
  report.full_grid = full ? grid(program.schedule(), found.marks, true) : "";
  return report;
}

} // namespace

Report failed(const Schedule& schedule, const Violation& violation, bool full) {
  Report report;
  report.rule = violation.rule;
  report.message = violation.message;
  const auto& row = schedule.rows[violation.rank];
  std::vector<Mark> marks;
  if (violation.at || !row.empty()) {
    marks.push_back({violation.rank, violation.at.value_or(row.size() - 1)});
  }
  report.grid = grid(schedule, marks, false);
  report.full_grid = full ? grid(schedule, marks, true) : "";
  return report;
}

std::optional<Report>
find_stop(const Program& program, LinkModel links, bool direct, bool full) {
  Untimed clocks;
  Greedy<Untimed> greedy(program, links, clocks, direct);
  if (greedy.run()) {
    return std::nullopt;
  }
  Rule rule = Rule::kDependencies;
  if (!direct && links.links != Links::kPosted) {
    // If it runs where no SEND waits, the links are to blame.
    const LinkModel posted{Links::kPosted, 1};
    if (auto report = find_stop(program, posted, false, full)) {
      return report;
    }
    rule = Rule::kDeadlock;
  }
  return stuck(program, greedy.stops(), rule, direct, full);
}

namespace {

// Why a schedule cannot be lowered.
Report
not_lowered(const Schedule& schedule, const ScheduleError& error, bool full) {
  const Program program(schedule);
  // Messages are missing anyway; what counts is the order within each rank.
  const auto violation = inspect_messages(program);
  if (violation && violation->rule == Rule::kDependencies) {
    return failed(schedule, *violation, full);
  }
  if (auto report = find_stop(program, {Links::kPosted, 1}, true, full)) {
    return *report;
  }
  return failed(schedule, {Rule::kDependencies, error.what(), 0, {}}, full);
}

} // namespace

Lowered::Lowered(const Schedule& schedule, bool full_grid)
    : schedule_(&schedule) {
  if (const auto violation = inspect_shape(schedule)) {
    // Numbers that lead outside cannot be written as a table either.
    report_.emplace();
    report_->rule = violation->rule;
    report_->message = violation->message;
    return;
  }
  if (const auto violation = inspect_counts(schedule)) {
    report_ = failed(schedule, *violation, full_grid);
    return;
  }
  if (wants_lowering(schedule)) {
    try {
      own_ = schedule.lower();
      schedule_ = &*own_;
    } catch (const ScheduleError& error) {
      report_ = not_lowered(schedule, error, full_grid);
      return;
    }
  }
  program_.emplace(*schedule_);
  std::optional<Violation> violation = inspect_messages(*program_);
  if (!violation) {
    violation = inspect_collectives(*schedule_);
  }
  if (violation) {
    report_ = failed(*schedule_, *violation, full_grid);
  }
}

} // namespace torch_sm3::pipeline
