// SPDX-License-Identifier: Apache-2.0
// Schedules as CSV, in all our words or in torch.distributed.pipelining's.
#include <schedule/cells.h>
#include <schedule/csv.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

// Whether torch.distributed.pipelining has a word for an action and for what
// becomes of its result.
bool torch_knows(const Schedule& schedule, Action action) {
  if (action.op == Op::kTieReduce || action.op == Op::kOptimizer ||
      action.op == Op::kValidate ||
      (is_message(action.op) && action.flags > 0)) {
    return false;
  }
  const bool routed =
      action.op == Op::kForward &&
      std::any_of(
          schedule.routes.begin(), schedule.routes.end(), [&](Route route) {
            return route.source == action.stage;
          });
  const bool tied =
      gives_weight_gradient(action.op) &&
      std::any_of(
          schedule.ties.begin(), schedule.ties.end(), [&](const auto& members) {
            return std::find(members.begin(), members.end(), action.stage) !=
                   members.end();
          });
  return !routed && !tied;
}

void check_torch(const Schedule& schedule) {
  for (size_t rank = 0; rank < schedule.ranks; ++rank) {
    const auto& row = schedule.rows[rank];
    for (size_t i = 0; i < row.size(); ++i) {
      if (!torch_knows(schedule, row[i])) {
        refuse_cell(
            "to_csv",
            "actions that torch.distributed.pipelining knows",
            schedule.text(row[i]),
            rank,
            i);
      }
    }
  }
}

std::string rows_of(const Schedule& schedule) {
  std::string out;
  for (const auto& row : schedule.rows) {
    for (size_t next = 0; next < row.size();) {
      if (next > 0) {
        out.push_back(',');
      }
      if (row[next].op == Op::kIdle) {
        // An empty line is a row without cells.
        out.append(row.size() == 1 ? "\"\"" : "");
        ++next;
      } else {
        next = append_cell(&out, schedule, row, next);
      }
    }
    out.append("\r\n");
  }
  return out;
}

} // namespace

std::string Schedule::to_csv(Dialect dialect) const {
  if (dialect == Dialect::kOwn) {
    return "# " + head_of(*this) + "\r\n" + rows_of(*this);
  }
  check_torch(*this);
  std::string rows = rows_of(*this);
  // torch infers all but the rows, and so does from_csv.
  const Schedule read = infer(rows, kind);
  if (read.ranks != ranks || read.stages != stages ||
      read.microbatches != microbatches) {
    throw ScheduleError(
        "Schedule.to_csv: expected actions on the last rank and of the last "
        "stage and microbatch, but got " +
        std::to_string(read.ranks) + " ranks, " + std::to_string(read.stages) +
        " stages and " + std::to_string(read.microbatches) +
        " microbatches in the cells (argument 'dialect')");
  }
  return rows;
}

} // namespace torch_sm3::pipeline
