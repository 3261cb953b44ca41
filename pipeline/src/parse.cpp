// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/pipeline/schedule.h>

#include <cctype>
#include <charconv>
#include <initializer_list>
#include <limits>
#include <map>
#include <optional>

namespace torch_sm3::pipeline {
namespace {

using Words = std::vector<std::string_view>;

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

// Takes the digits that `text` starts with; nothing if there are none, too many
// or more of them than the one canonical spelling has.
std::optional<uint32_t> take_number(std::string_view* text) {
  uint32_t value = 0;
  const char* begin = text->data();
  const auto [end, error] = std::from_chars(begin, begin + text->size(), value);
  const auto length = static_cast<size_t>(end - begin);
  if (error != std::errc{} || (length > 1 && *begin == '0')) {
    return std::nullopt;
  }
  text->remove_prefix(length);
  return value;
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

std::optional<Action> parse_action(std::string_view cell) {
  if (cell == ".") {
    return Action{};
  }
  const std::optional<uint32_t> stage = take_number(&cell);
  size_t letters = 0;
  while (letters < cell.size() &&
         !std::isdigit(static_cast<unsigned char>(cell[letters]))) {
    ++letters;
  }
  const std::string_view op_name = cell.substr(0, letters);
  cell.remove_prefix(letters);
  const std::optional<uint32_t> microbatch = take_number(&cell);
  if (!stage || *stage > std::numeric_limits<uint16_t>::max() || !microbatch ||
      !cell.empty()) {
    return std::nullopt;
  }
  for (const Op op :
       {Op::kForward,
        Op::kBackward,
        Op::kSendForward,
        Op::kRecvForward,
        Op::kSendBackward,
        Op::kRecvBackward}) {
    if (op_name == name(op)) {
      return Action{op, 0, static_cast<uint16_t>(*stage), *microbatch};
    }
  }
  return std::nullopt;
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

Schedule parse_head(const Words& words) {
  if (words.size() < 2 || words[0] != "schedule" || words[1] != "1") {
    fail("'schedule 1 ...' in the first line", words.empty() ? "" : words[0]);
  }
  std::map<std::string_view, std::string_view> values;
  for (size_t i = 2; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    if (equals == std::string_view::npos ||
        !values.emplace(words[i].substr(0, equals), words[i].substr(equals + 1))
             .second) {
      fail("key=value, each key once", words[i]);
    }
  }
  const auto take = [&](const char* key) {
    const auto found = values.find(key);
    if (found == values.end()) {
      fail("a value of " + std::string(key) + " in the first line", "none");
    }
    const std::string_view value = found->second;
    values.erase(found);
    return value;
  };
  constexpr uint32_t kMostStages = std::numeric_limits<uint16_t>::max();
  constexpr uint32_t kMost = std::numeric_limits<uint32_t>::max();
  Schedule schedule;
  schedule.kind = take("kind");
  if (schedule.kind.empty()) {
    fail("a kind", "");
  }
  schedule.ranks = number(take("ranks"), "ranks", 1, kMostStages);
  schedule.stages = number(take("stages"), "stages", 1, kMostStages);
  schedule.microbatches =
      number(take("microbatches"), "microbatches", 1, kMost);
  schedule.placement = parse_placement(take("placement"), schedule);
  if (!values.empty()) {
    fail(
        "no key besides kind, ranks, stages, microbatches and placement",
        values.begin()->first);
  }
  return schedule;
}

// What is wrong with an action in the row of `rank`, or an empty string.
std::string misfit(const Schedule& schedule, uint32_t rank, Action action) {
  if (action.op == Op::kIdle) {
    return "";
  }
  if (action.stage >= schedule.stages) {
    return "a stage below " + std::to_string(schedule.stages);
  }
  if (action.microbatch >= schedule.microbatches) {
    return "a microbatch below " + std::to_string(schedule.microbatches);
  }
  if (schedule.placement[action.stage] != rank) {
    return "a stage of rank " + std::to_string(rank) + " (stage " +
           std::to_string(action.stage) + " is on rank " +
           std::to_string(schedule.placement[action.stage]) + ")";
  }
  return "";
}

std::vector<Action>
parse_row(const Schedule& schedule, uint32_t rank, const Words& cells) {
  std::vector<Action> row;
  row.reserve(cells.size());
  for (const std::string_view cell : cells) {
    std::string expected =
        "an action <stage><op><microbatch> with op F, B, SEND_F, RECV_F, "
        "SEND_B or RECV_B";
    if (const std::optional<Action> action = parse_action(cell)) {
      expected = misfit(schedule, rank, *action);
      if (expected.empty()) {
        row.push_back(*action);
        continue;
      }
    }
    throw ScheduleError(
        "Schedule: expected " + expected + ", but got '" + std::string(cell) +
        "' in row " + std::to_string(rank) + ", column " +
        std::to_string(row.size()) + " (argument 'text')");
  }
  return row;
}

} // namespace

Schedule Schedule::parse(std::string_view text) {
  std::optional<Schedule> schedule;
  std::vector<bool> seen;
  for (std::string_view line : split(text, "\n")) {
    line = line.substr(0, line.find('#'));
    const Words words = split(line, " \t\r");
    if (words.empty()) {
      continue;
    }
    if (!schedule) {
      schedule = parse_head(words);
      schedule->rows.resize(schedule->ranks);
      seen.resize(schedule->ranks);
      continue;
    }
    if (words.size() < 2 || words[0] != "rank" || words[1].back() != ':') {
      fail("a line 'rank <r>: ...'", words[0]);
    }
    const std::string_view digits = words[1].substr(0, words[1].size() - 1);
    const uint32_t rank = number(digits, "a rank", 0, schedule->ranks - 1);
    if (seen[rank]) {
      fail("each rank once", digits);
    }
    seen[rank] = true;
    schedule->rows[rank] =
        parse_row(*schedule, rank, Words(words.begin() + 2, words.end()));
  }
  if (!schedule) {
    fail("'schedule 1 ...' in the first line", "");
  }
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    if (!seen[rank]) {
      fail("a line 'rank " + std::to_string(rank) + ": ...'", "none");
    }
  }
  return *schedule;
}

} // namespace torch_sm3::pipeline
