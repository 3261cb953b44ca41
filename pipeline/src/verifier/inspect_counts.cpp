// SPDX-License-Identifier: Apache-2.0
// Rule 1, and that a schedule's parts fit together.
#include <verifier/inspect.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

std::string expected(const std::string& what, const std::string& got) {
  return "verify: expected " + what + ", but got " + got;
}

std::string where(size_t stage, size_t microbatch) {
  return " of stage " + std::to_string(stage) + " and microbatch " +
         std::to_string(microbatch);
}

Violation counts(const std::string& what, const std::string& got) {
  return {Rule::kCounts, expected(what, got), 0, std::nullopt};
}

// What is wrong with one action's numbers, or an empty string.
std::string misplaced(const Schedule& schedule, uint32_t rank, Action action) {
  const auto below = [](const char* what, size_t limit) {
    return std::string("a ") + what + " below " + std::to_string(limit);
  };
  if (action.stage >= schedule.stages) {
    return below("stage", schedule.stages);
  }
  const bool placed = is_compute(action.op) || is_message(action.op) ||
                      action.op == Op::kReduceGrad ||
                      action.op == Op::kTieReduce;
  if (placed && schedule.placement[action.stage] != rank) {
    return "stage " + std::to_string(action.stage) + " on rank " +
           std::to_string(schedule.placement[action.stage]) + " alone";
  }
  if (action.op == Op::kTieReduce) {
    return action.microbatch < schedule.ties.size()
               ? ""
               : below("tie", schedule.ties.size());
  }
  if (action.microbatch >= schedule.microbatches) {
    return below("microbatch", schedule.microbatches);
  }
  if (!is_message(action.op) || action.flags == 0) {
    return "";
  }
  if (action.flags > schedule.routes.size()) {
    return below("route", schedule.routes.size());
  }
  const Route route = schedule.routes[action.flags - 1u];
  const bool at_source =
      action.op == Op::kSendForward || action.op == Op::kRecvBackward;
  return action.stage == (at_source ? route.source : route.target)
             ? ""
             : "an end of its route as the stage";
}

bool all_below(const std::vector<uint16_t>& stages, uint32_t limit) {
  return std::all_of(stages.begin(), stages.end(), [&](uint16_t stage) {
    return stage < limit;
  });
}

std::optional<Violation> inspect_sizes(const Schedule& schedule) {
  if (schedule.rows.size() != schedule.ranks) {
    return counts(
        std::to_string(schedule.ranks) + " rows",
        std::to_string(schedule.rows.size()));
  }
  if (schedule.placement.size() != schedule.stages || schedule.stages == 0 ||
      std::any_of(
          schedule.placement.begin(),
          schedule.placement.end(),
          [&](uint32_t rank) { return rank >= schedule.ranks; })) {
    return counts("a rank for each stage", "another placement");
  }
  for (const Route route : schedule.routes) {
    if (route.source >= route.target || route.target >= schedule.stages) {
      return counts(
          "routes to later stages",
          std::to_string(route.source) + ">" + std::to_string(route.target));
    }
  }
  for (const auto& tie : schedule.ties) {
    if (!all_below(tie, schedule.stages)) {
      return counts("ties of the schedule's stages", "others");
    }
  }
  return std::nullopt;
}

// Which of the computations of one stage and microbatch were met.
constexpr uint8_t kF = 1;
constexpr uint8_t kB = 2;
constexpr uint8_t kI = 4;
constexpr uint8_t kW = 8;

uint8_t bit_of(Op op) {
  switch (op) {
    case Op::kForward:
      return kF;
    case Op::kBackward:
      return kB;
    case Op::kBackwardInput:
      return kI;
    default:
      return kW;
  }
}

// Why an action may not follow what was met before, or an empty string.
std::string refusal(uint8_t met, Op op) {
  const uint8_t bit = bit_of(op);
  if ((met & bit) != 0) {
    return std::string("one ") + name(op);
  }
  if (bit == kF && met != 0) {
    return "F before the backward";
  }
  if (bit != kF && (met & kF) == 0) {
    return std::string("F before ") + name(op);
  }
  if (bit == kB ? (met & (kI | kW)) != 0 : (met & kB) != 0) {
    return "either B or I and W";
  }
  return bit == kW && (met & kI) == 0 ? "I before W" : "";
}

} // namespace

std::optional<Violation> inspect_shape(const Schedule& schedule) {
  if (auto violation = inspect_sizes(schedule)) {
    return violation;
  }
  for (uint32_t rank = 0; rank < schedule.ranks; ++rank) {
    const auto& row = schedule.rows[rank];
    for (size_t at = 0; at < row.size(); ++at) {
      const std::string what = misplaced(schedule, rank, row[at]);
      if (!what.empty()) {
        return Violation{
            Rule::kCounts,
            expected(
                what,
                std::to_string(row[at].stage) + name(row[at].op) +
                    std::to_string(row[at].microbatch) + " on rank " +
                    std::to_string(rank)),
            rank,
            at};
      }
    }
  }
  return std::nullopt;
}

std::optional<Violation> inspect_counts(const Schedule& schedule) {
  const size_t pieces = size_t{schedule.stages} * schedule.microbatches;
  size_t forwards = 0;
  bool training = false;
  for (const auto& row : schedule.rows) {
    for (const Action action : row) {
      forwards += action.op == Op::kForward ? 1 : 0;
      training |= is_compute(action.op) && action.op != Op::kForward;
    }
  }
  // A header may promise far more than the rows hold.
  if (forwards < pieces / 2) {
    return counts(
        std::to_string(pieces) + " F, one for each stage and microbatch",
        std::to_string(forwards));
  }
  std::vector<uint8_t> met(pieces);
  for (uint32_t rank = 0; rank < schedule.ranks; ++rank) {
    const auto& row = schedule.rows[rank];
    for (size_t at = 0; at < row.size(); ++at) {
      const Action action = row[at];
      if (!is_compute(action.op)) {
        continue;
      }
      uint8_t& of =
          met[size_t{action.stage} * schedule.microbatches + action.microbatch];
      const std::string what = refusal(of, action.op);
      if (!what.empty()) {
        return Violation{
            Rule::kCounts,
            expected(
                what + where(action.stage, action.microbatch),
                schedule.text(action) + " at index " + std::to_string(at) +
                    " of rank " + std::to_string(rank)),
            rank,
            at};
      }
      of |= bit_of(action.op);
    }
  }
  for (size_t i = 0; i < pieces; ++i) {
    const bool whole = (met[i] & kB) != 0 || (met[i] & (kI | kW)) == (kI | kW);
    if ((met[i] & kF) == 0 || (training && !whole)) {
      const char* what = (met[i] & kF) == 0   ? "one F"
                         : (met[i] & kI) != 0 ? "a W after I"
                                              : "one B, or one I and W,";
      Violation violation = counts(
          what + where(i / schedule.microbatches, i % schedule.microbatches),
          "none");
      violation.rank = schedule.placement[i / schedule.microbatches];
      return violation;
    }
  }
  return std::nullopt;
}

} // namespace torch_sm3::pipeline
