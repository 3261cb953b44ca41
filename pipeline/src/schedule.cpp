// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/pipeline/schedule.h>

#include <algorithm>
#include <array>

namespace torch_sm3::pipeline {
namespace {

struct Spelling {
  Op op;
  const char* text;
};
constexpr std::array<Spelling, kOps - 1> kSpellings{{
    {Op::kForward, "F"},
    {Op::kBackward, "B"},
    {Op::kBackwardInput, "I"},
    {Op::kBackwardWeight, "W"},
    {Op::kSendForward, "SEND_F"},
    {Op::kRecvForward, "RECV_F"},
    {Op::kSendBackward, "SEND_B"},
    {Op::kRecvBackward, "RECV_B"},
    {Op::kReduceGrad, "REDUCE_GRAD"},
    {Op::kTieReduce, "TIE_REDUCE"},
    {Op::kOptimizer, "OPTIM"},
    {Op::kValidate, "VALIDATE"},
    {Op::kUnshard, "UNSHARD"},
    {Op::kReshard, "RESHARD"},
}};

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

} // namespace

const char* name(Op op) {
  for (const Spelling& spelling : kSpellings) {
    if (spelling.op == op) {
      return spelling.text;
    }
  }
  return ".";
}

std::string text(Action action) {
  if (action.op == Op::kIdle) {
    return ".";
  }
  return std::to_string(action.stage) + name(action.op) +
         std::to_string(action.microbatch);
}

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
      return is_message(action.op);
    });
  });
}

std::string Schedule::text() const {
  std::string out =
      "schedule 1 kind=" + kind + " ranks=" + std::to_string(ranks) +
      " stages=" + std::to_string(stages) +
      " microbatches=" + std::to_string(microbatches) + " placement=";
  if (const char* known = placement_name(*this)) {
    out += known;
  } else {
    for (uint32_t stage = 0; stage < stages; ++stage) {
      out += stage > 0 ? "," : "";
      out += std::to_string(placement[stage]);
    }
  }
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    out += "\nrank " + std::to_string(rank) + ":";
    for (const Action action : rows[rank]) {
      out += ' ';
      out += pipeline::text(action);
    }
  }
  return out + "\n";
}

} // namespace torch_sm3::pipeline
