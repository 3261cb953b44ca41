// SPDX-License-Identifier: Apache-2.0
#include <schedule/cells.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>

namespace torch_sm3::pipeline {
namespace {

using Words = std::vector<std::string_view>;
constexpr const char* kBlank = " \t\r";

[[noreturn]] void fail(const std::string& expected, std::string_view got) {
  throw ScheduleError(
      "Schedule: expected " + expected + ", but got '" + std::string(got) +
      "' (argument 'text')");
}

Words split(std::string_view text, std::string_view separators) {
  Words words;
  while (!text.empty()) {
    const size_t end = std::min(text.find_first_of(separators), text.size());
    if (end > 0) {
      words.push_back(text.substr(0, end));
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return words;
}

// Takes the next word; rows of millions of cells are read without a list.
std::optional<std::string_view> take_word(std::string_view* text) {
  text->remove_prefix(std::min(text->find_first_not_of(kBlank), text->size()));
  const std::string_view word =
      text->substr(0, std::min(text->find_first_of(kBlank), text->size()));
  text->remove_prefix(word.size());
  return word.empty() ? std::nullopt : std::optional(word);
}

uint32_t number(
    std::string_view text,
    const std::string& what,
    uint32_t least,
    uint32_t most) {
  std::string_view rest = text;
  const std::optional<uint32_t> value = take_number(&rest);
  if (!value || !rest.empty() || *value < least || *value > most) {
    fail(
        what + " from " + std::to_string(least) + " to " + std::to_string(most),
        text);
  }
  return *value;
}

std::vector<uint32_t>
parse_placement(std::string_view value, const Schedule& schedule) {
  if (value == "loop") {
    return loop_placement(schedule.ranks, schedule.stages);
  }
  if (value == "v") {
    return v_placement(schedule.ranks, schedule.stages);
  }
  std::vector<uint32_t> placement;
  for (const std::string_view item : split(value, ",")) {
    placement.push_back(
        number(item, "a placement: loop, v or ranks", 0, schedule.ranks - 1));
  }
  if (placement.size() != schedule.stages) {
    fail(
        "a placement of " + std::to_string(schedule.stages) + " stages", value);
  }
  return placement;
}

uint16_t parse_stage(std::string_view value, const Schedule& schedule) {
  return static_cast<uint16_t>(
      number(value, "a stage", 0, schedule.stages - 1));
}

std::vector<Route>
parse_routes(std::string_view value, const Schedule& schedule) {
  std::vector<Route> routes;
  for (const std::string_view item : split(value, ",")) {
    const size_t arrow = std::min(item.find('>'), item.size() - 1);
    routes.push_back(
        {parse_stage(item.substr(0, arrow), schedule),
         parse_stage(item.substr(arrow + 1), schedule)});
  }
  return routes;
}

std::vector<std::vector<uint16_t>>
parse_ties(std::string_view value, const Schedule& schedule) {
  std::vector<std::vector<uint16_t>> ties;
  for (const std::string_view item : split(value, ",")) {
    std::vector<uint16_t>& members = ties.emplace_back();
    for (const std::string_view stage : split(item, "+")) {
      members.push_back(parse_stage(stage, schedule));
    }
  }
  return ties;
}

// The values of the first line, by key.
using Keys = std::map<std::string_view, std::string_view>;

Keys split_keys(const Words& words) {
  Keys keys;
  for (size_t i = 2; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    if (equals == std::string_view::npos ||
        !keys.emplace(words[i].substr(0, equals), words[i].substr(equals + 1))
             .second) {
      fail("key=value, each key once", words[i]);
    }
  }
  return keys;
}

std::string_view take(Keys* keys, const char* key) {
  const auto found = keys->find(key);
  if (found == keys->end()) {
    fail("a value of " + std::string(key) + " in the first line", "none");
  }
  const std::string_view value = found->second;
  keys->erase(found);
  return value;
}

std::vector<Action>
parse_row(const Schedule& schedule, uint32_t rank, std::string_view line) {
  std::vector<Action> row;
  // Shorter cells than `0F0 ` exist, but few.
  row.reserve(line.size() / 4);
  size_t column = 0;
  while (const std::optional<std::string_view> cell = take_word(&line)) {
    push_cell(schedule, rank, column++, *cell, &row);
  }
  row.shrink_to_fit();
  return row;
}

} // namespace

Schedule parse_head(std::string_view line) {
  const Words words = split(line, kBlank);
  if (words.size() < 2 || words[0] != "schedule" || words[1] != "1") {
    fail("'schedule 1 ...' in the first line", words.empty() ? "" : words[0]);
  }
  Keys keys = split_keys(words);
  constexpr uint32_t kMostStages = std::numeric_limits<uint16_t>::max();
  constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
  Schedule schedule;
  schedule.kind = take(&keys, "kind");
  if (schedule.kind.empty()) {
    fail("a kind", "");
  }
  schedule.ranks = number(take(&keys, "ranks"), "ranks", 1, kMostStages);
  schedule.stages = number(take(&keys, "stages"), "stages", 1, kMostStages);
  schedule.microbatches =
      number(take(&keys, "microbatches"), "microbatches", 1, kMost);
  schedule.placement = parse_placement(take(&keys, "placement"), schedule);
  if (keys.count("routes") > 0) {
    const std::string_view value = take(&keys, "routes");
    schedule.routes = parse_routes(value, schedule);
    if (schedule.routes.empty()) {
      fail("one route or more", value);
    }
  }
  if (keys.count("ties") > 0) {
    const std::string_view value = take(&keys, "ties");
    schedule.ties = parse_ties(value, schedule);
    if (schedule.ties.empty()) {
      fail("one tie or more", value);
    }
  }
  sort_routes(&schedule);
  if (!keys.empty()) {
    fail(
        "no key besides kind, ranks, stages, microbatches, placement, routes "
        "and ties",
        keys.begin()->first);
  }
  schedule.rows.resize(schedule.ranks);
  return schedule;
}

void push_cell(
    const Schedule& schedule,
    uint32_t rank,
    size_t column,
    std::string_view text,
    std::vector<Action>* row) {
  std::string expected = cell_grammar();
  if (std::optional<Cell> cell = parse_cell(text)) {
    expected = number_route(schedule, &*cell)
                   ? misfit(schedule, rank, cell->first)
                   : "a route of the first line";
    if (expected.empty() && cell->second) {
      expected = misfit(schedule, rank, *cell->second);
    }
    if (expected.empty()) {
      row->push_back(cell->first);
      if (cell->second) {
        row->push_back(*cell->second);
      }
      return;
    }
  }
  throw ScheduleError(
      "Schedule: expected " + expected + ", but got '" + std::string(text) +
      "' in row " + std::to_string(rank) + ", column " +
      std::to_string(column) + " (argument 'text')");
}

Schedule Schedule::parse(std::string_view text) {
  std::optional<Schedule> schedule;
  std::vector<bool> seen;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    line = line.substr(0, line.find('#'));
    std::string_view rest = line;
    const std::optional<std::string_view> first = take_word(&rest);
    if (!first) {
      continue;
    }
    if (!schedule) {
      schedule = parse_head(line);
      seen.resize(schedule->ranks);
      continue;
    }
    const std::string_view second = take_word(&rest).value_or("");
    if (*first != "rank" || second.empty() || second.back() != ':') {
      fail("a line 'rank <r>: ...'", *first);
    }
    const std::string_view digits = second.substr(0, second.size() - 1);
    const uint32_t rank = number(digits, "a rank", 0, schedule->ranks - 1);
    if (seen[rank]) {
      fail("each rank once", digits);
    }
    seen[rank] = true;
    schedule->rows[rank] = parse_row(*schedule, rank, rest);
  }
  if (!schedule) {
    fail("'schedule 1 ...' in the first line", "");
  }
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    if (!seen[rank]) {
      fail("a line 'rank " + std::to_string(rank) + ": ...'", "none");
    }
  }
  return std::move(*schedule);
}

} // namespace torch_sm3::pipeline
