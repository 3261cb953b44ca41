// SPDX-License-Identifier: Apache-2.0
// What a runner refuses before any rank tells another.
#include <runtime/agree.h>
#include <runtime/control.h>
#include <runtime/rank_program.h>

#include <torch_sm3/check.h>

#include <algorithm>
#include <map>
#include <utility>

namespace torch_sm3::pipeline {
namespace {

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

} // namespace

std::string delays(const RunnerOptions& options) {
  std::string text;
  for (const auto& [link, seconds] : options.link_delay) {
    text += c10::str(
        text.empty() ? "" : ", ", link.first, ">", link.second, ": ", seconds);
  }
  return "{" + text + "}";
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
      options.timeout > 0 && options.timeout <= kLongest,
      "PipelineRunner",
      "options",
      c10::str("a timeout above 0 s and at most ", kLongest, " s"),
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
            std::max(link.first, link.second) < ranks && seconds >= 0 &&
            seconds <= kLongest,
        "PipelineRunner",
        "options",
        c10::str("link_delay of seconds for pairs of ", ranks, " ranks"),
        delays(options));
  }
}

void check_backward_order(const Schedule& schedule) {
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

} // namespace torch_sm3::pipeline
