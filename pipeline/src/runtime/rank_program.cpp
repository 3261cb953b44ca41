// SPDX-License-Identifier: Apache-2.0
#include <runtime/rank_program.h>

#include <torch_sm3/check.h>

#include <algorithm>

namespace torch_sm3::pipeline {

RankProgram::RankProgram(Schedule lowered, uint32_t rank)
    : schedule_(std::move(lowered)), rank_(rank) {
  TORCH_SM3_CHECK_VALUE(
      rank < schedule_.ranks,
      "PipelineRunner",
      "schedule",
      c10::str("a schedule of more than ", rank, " ranks"),
      schedule_.ranks);
  for (const uint16_t stage : stages()) {
    ways_[stage];
  }
  for (uint32_t stage = 0; stage + 1 < schedule_.stages; ++stage) {
    connect(
        static_cast<uint16_t>(stage),
        static_cast<uint16_t>(stage + 1),
        Channel::kActivation,
        Channel::kGradient);
  }
  for (uint32_t i = 0; i < schedule_.routes.size(); ++i) {
    const Route route = schedule_.routes[i];
    connect(
        route.source,
        route.target,
        channel_of_route(i, false),
        channel_of_route(i, true));
  }
}

void RankProgram::connect(
    uint16_t source,
    uint16_t target,
    Channel there,
    Channel back) {
  if (schedule_.placement[source] == rank_) {
    ways_[source].values_out.push_back(make_way(there, source, target));
    ways_[source].gradients_in.push_back(make_way(back, target, source));
  }
  if (schedule_.placement[target] == rank_) {
    ways_[target].values_in.push_back(make_way(there, source, target));
    ways_[target].gradients_out.push_back(make_way(back, target, source));
  }
}

Way RankProgram::make_way(Channel channel, uint16_t source, uint16_t target)
    const {
  const uint32_t from = schedule_.placement[source];
  const uint32_t to = schedule_.placement[target];
  return {channel, source, target, from == rank_ ? to : from, from == to};
}

const Way& RankProgram::way(Action action) const {
  const StageWays& own = ways(action.stage);
  const bool backward =
      action.op == Op::kSendBackward || action.op == Op::kRecvBackward;
  const bool sends =
      action.op == Op::kSendForward || action.op == Op::kSendBackward;
  const auto& all = backward ? (sends ? own.gradients_out : own.gradients_in)
                             : (sends ? own.values_out : own.values_in);
  const Channel channel = action.flags > 0
                              ? channel_of_route(action.flags - 1u, backward)
                          : backward ? Channel::kGradient
                                     : Channel::kActivation;
  const auto found = std::find_if(all.begin(), all.end(), [&](const Way& e) {
    return e.channel == channel && !e.local;
  });
  if (found == all.end()) {
    throw ScheduleError(
        "Schedule: expected messages between stages of different ranks, but "
        "got " +
        text(action) + " (argument 'schedule')");
  }
  return *found;
}

std::vector<uint16_t> RankProgram::stages() const {
  std::vector<uint16_t> own;
  for (uint32_t stage = 0; stage < schedule_.stages; ++stage) {
    if (schedule_.placement[stage] == rank_) {
      own.push_back(static_cast<uint16_t>(stage));
    }
  }
  return own;
}

bool RankProgram::trains() const {
  return std::any_of(
      schedule_.rows.begin(), schedule_.rows.end(), [](const auto& row) {
        return std::any_of(row.begin(), row.end(), [](Action action) {
          return gives_input_gradient(action.op);
        });
      });
}

Schedule forward_of(const Schedule& schedule, uint32_t microbatches) {
  Schedule made = schedule;
  made.kind = "forward";
  made.microbatches = microbatches;
  made.ties.clear();
  made.rows.assign(made.ranks, {});
  for (uint32_t stage = 0; stage < made.stages; ++stage) {
    auto& row = made.rows[made.placement[stage]];
    for (uint32_t i = 0; i < microbatches; ++i) {
      row.push_back({Op::kForward, 0, static_cast<uint16_t>(stage), i});
    }
  }
  return made.lower();
}

} // namespace torch_sm3::pipeline
