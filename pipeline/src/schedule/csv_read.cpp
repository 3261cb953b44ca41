// SPDX-License-Identifier: Apache-2.0
// One row per rank, one cell per slot: what torch.distributed.pipelining
// writes, and the same with the whole language.
#include <schedule/cells.h>
#include <schedule/csv.h>
#include <torch_sm3/pipeline/verifier.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

constexpr std::string_view kHead = "# schedule ";

// The schedule of a first line `# schedule 1 ...`, if there is one.
std::optional<Schedule> declared(std::string_view text) {
  if (text.substr(0, kHead.size()) != kHead) {
    return std::nullopt;
  }
  const std::string_view head = take_line(&text)->substr(2);
  return parse_head(head.substr(0, head.find('#')));
}

// The forwards and backwards of a schedule alone.
Schedule computation_of(Schedule schedule) {
  for (auto& row : schedule.rows) {
    row.erase(
        std::remove_if(
            row.begin(),
            row.end(),
            [](Action action) { return !is_compute(action.op); }),
        row.end());
  }
  return schedule;
}

// Refuses what cannot run at all; how many sends may wait is for the reader.
void check_order(const Schedule& schedule) {
  VerifyOptions options;
  options.links.links = Links::kPosted;
  try {
    // Torch's files lack OPTIM.
    verify(schedule.lower(), options).raise_if_invalid();
  } catch (const ScheduleError&) {
    // With a counter-example, if the order is to blame.
    verify(computation_of(schedule), options).raise_if_invalid();
    throw;
  }
}

} // namespace

Schedule Schedule::from_csv(std::string_view text, const std::string& kind) {
  std::optional<Schedule> schedule = declared(text);
  if (!schedule) {
    schedule = infer(text, kind);
  }
  each_row(text, [&](size_t row, std::string_view line) {
    if (row >= schedule->ranks) {
      if (!strip(line).empty()) {
        refuse_cell(
            "from_csv",
            std::to_string(schedule->ranks) + " rows",
            strip(line),
            row,
            0);
      }
      return;
    }
    std::vector<Action>& actions = schedule->rows[row];
    each_cell(line, [&](size_t column, std::string_view cell) {
      push_cell(*schedule, static_cast<uint32_t>(row), column, cell, &actions);
    });
    actions.shrink_to_fit();
  });
  check_order(*schedule);
  return std::move(*schedule);
}

} // namespace torch_sm3::pipeline
