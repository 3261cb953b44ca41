// SPDX-License-Identifier: Apache-2.0
#include <schedule/cells.h>
#include <schedule/csv.h>

#include <algorithm>
#include <limits>
#include <set>
#include <vector>

namespace torch_sm3::pipeline {
namespace {

constexpr uint32_t kNowhere = std::numeric_limits<uint32_t>::max();

// What the cells of a file say about the schedule that they belong to.
class Inference {
 public:
  explicit Inference(std::string_view text) {
    each_row(text, [&](size_t row, std::string_view line) {
      each_cell(line, [&](size_t column, std::string_view cell) {
        look(row, column, cell);
      });
    });
  }

  Schedule schedule(const std::string& kind) const {
    if (placement_.empty()) {
      throw ScheduleError(
          "Schedule.from_csv: expected a cell with a stage, but got none");
    }
    const auto missing =
        std::find(placement_.begin(), placement_.end(), kNowhere);
    if (missing != placement_.end()) {
      throw ScheduleError(
          "Schedule.from_csv: expected actions of each stage below " +
          std::to_string(placement_.size()) + ", but got none of stage " +
          std::to_string(missing - placement_.begin()));
    }
    for (const Route route : routes_) {
      if (route.target >= placement_.size()) {
        throw ScheduleError(
            "Schedule.from_csv: expected actions of stage " +
            std::to_string(route.target) + ", but got only messages to it");
      }
    }
    Schedule made;
    made.kind = kind;
    made.ranks = ranks_;
    made.stages = static_cast<uint32_t>(placement_.size());
    made.microbatches = microbatches_;
    made.placement = placement_;
    made.routes.assign(routes_.begin(), routes_.end());
    made.rows.resize(ranks_);
    return made;
  }

 private:
  void look(size_t row, size_t column, std::string_view text) {
    const std::optional<Cell> cell = parse_cell(text);
    if (!cell || row >= std::numeric_limits<uint16_t>::max()) {
      refuse_cell("from_csv", cell_grammar(), text, row, column);
    }
    ranks_ = static_cast<uint32_t>(row + 1);
    note(row, column, text, cell->first);
    if (cell->second) {
      note(row, column, text, *cell->second);
    }
    if (cell->other) {
      const Route route = route_of(cell->first, *cell->other);
      if (route.source >= route.target) {
        refuse_cell("from_csv", "a route to a later stage", text, row, column);
      }
      routes_.insert(route);
      if (routes_.size() > kMostRoutes) {
        refuse_cell("from_csv", "fewer routes", text, row, column);
      }
    }
  }

  void note(size_t row, size_t column, std::string_view text, Action action) {
    if (action.op == Op::kTieReduce) {
      refuse_cell("from_csv", "a first line with the ties", text, row, column);
    }
    if (action.op == Op::kIdle || action.op == Op::kOptimizer ||
        action.op == Op::kValidate) {
      return;
    }
    if (action.stage >= placement_.size()) {
      placement_.resize(action.stage + 1u, kNowhere);
    }
    uint32_t& rank = placement_[action.stage];
    if (rank != kNowhere && rank != row) {
      refuse_cell(
          "from_csv",
          "stage " + std::to_string(action.stage) + " in row " +
              std::to_string(rank) + " only",
          text,
          row,
          column);
    }
    rank = static_cast<uint32_t>(row);
    if (action.microbatch == std::numeric_limits<uint32_t>::max()) {
      refuse_cell("from_csv", "fewer microbatches", text, row, column);
    }
    microbatches_ = std::max(microbatches_, action.microbatch + 1);
  }

  uint32_t ranks_ = 0;
  uint32_t microbatches_ = 1;
  std::vector<uint32_t> placement_;
  std::set<Route> routes_;
};

} // namespace

Schedule infer(std::string_view text, const std::string& kind) {
  return Inference(text).schedule(kind);
}

} // namespace torch_sm3::pipeline
