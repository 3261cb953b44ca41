// SPDX-License-Identifier: Apache-2.0
// One row per rank, one cell per slot: what torch.distributed.pipelining reads
// and writes, and the same with the whole language.
#include <schedule/cells.h>
#include <torch_sm3/pipeline/verifier.h>

#include <algorithm>
#include <limits>
#include <set>

namespace torch_sm3::pipeline {
namespace {

constexpr uint32_t kNowhere = std::numeric_limits<uint32_t>::max();
constexpr std::string_view kHead = "# schedule ";

[[noreturn]] void fail(
    const char* reader,
    const std::string& expected,
    std::string_view cell,
    size_t row,
    size_t column) {
  throw ScheduleError(
      "Schedule." + std::string(reader) + ": expected " + expected +
      ", but got '" + std::string(cell) + "' in row " + std::to_string(row) +
      ", column " + std::to_string(column));
}

std::string_view strip(std::string_view text) {
  constexpr const char* kBlank = " \t\r";
  text.remove_prefix(std::min(text.find_first_not_of(kBlank), text.size()));
  text.remove_suffix(text.size() - (text.find_last_not_of(kBlank) + 1));
  return text;
}

std::optional<std::string_view> take_line(std::string_view* text) {
  if (text->empty()) {
    return std::nullopt;
  }
  const size_t end = std::min(text->find('\n'), text->size());
  const std::string_view line = text->substr(0, end);
  text->remove_prefix(std::min(end + 1, text->size()));
  return line;
}

// Calls `use` with the number and text of each cell of a line.
template <class Use>
void each_cell(std::string_view line, const Use& use) {
  line = strip(line);
  for (size_t column = 0; !line.empty() || column > 0; ++column) {
    const size_t end = std::min(line.find(','), line.size());
    std::string_view cell = strip(line.substr(0, end));
    if (cell.size() >= 2 && cell.front() == '"' && cell.back() == '"') {
      cell = strip(cell.substr(1, cell.size() - 2));
    }
    use(column, cell.empty() ? std::string_view(".") : cell);
    if (end == line.size()) {
      return;
    }
    line.remove_prefix(end + 1);
  }
}

// Calls `use` with number and text of each line that is a row.
template <class Use>
void each_row(std::string_view text, const Use& use) {
  size_t row = 0;
  while (const std::optional<std::string_view> line = take_line(&text)) {
    if (line->empty() || line->front() != '#') {
      use(row++, *line);
    }
  }
}

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
      fail("from_csv", cell_grammar(), text, row, column);
    }
    ranks_ = static_cast<uint32_t>(row + 1);
    note(row, column, text, cell->first);
    if (cell->second) {
      note(row, column, text, *cell->second);
    }
    if (cell->other) {
      const Route route = route_of(cell->first, *cell->other);
      if (route.source >= route.target) {
        fail("from_csv", "a route to a later stage", text, row, column);
      }
      routes_.insert(route);
      if (routes_.size() > kMostRoutes) {
        fail("from_csv", "fewer routes", text, row, column);
      }
    }
  }

  void note(size_t row, size_t column, std::string_view text, Action action) {
    if (action.op == Op::kTieReduce) {
      fail("from_csv", "a first line with the ties", text, row, column);
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
      fail(
          "from_csv",
          "stage " + std::to_string(action.stage) + " in row " +
              std::to_string(rank) + " only",
          text,
          row,
          column);
    }
    rank = static_cast<uint32_t>(row);
    if (action.microbatch == std::numeric_limits<uint32_t>::max()) {
      fail("from_csv", "fewer microbatches", text, row, column);
    }
    microbatches_ = std::max(microbatches_, action.microbatch + 1);
  }

  uint32_t ranks_ = 0;
  uint32_t microbatches_ = 1;
  std::vector<uint32_t> placement_;
  std::set<Route> routes_;
};

// The schedule of a first line `# schedule 1 ...`, if there is one.
std::optional<Schedule> declared(std::string_view text) {
  if (text.substr(0, kHead.size()) != kHead) {
    return std::nullopt;
  }
  const std::string_view head = take_line(&text)->substr(2);
  return parse_head(head.substr(0, head.find('#')));
}

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
        fail(
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
    schedule = Inference(text).schedule(kind);
  }
  each_row(text, [&](size_t row, std::string_view line) {
    if (row >= schedule->ranks) {
      if (!strip(line).empty()) {
        fail(
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

std::string Schedule::to_csv(Dialect dialect) const {
  if (dialect == Dialect::kOwn) {
    return "# " + head_of(*this) + "\r\n" + rows_of(*this);
  }
  check_torch(*this);
  std::string rows = rows_of(*this);
  // torch infers all but the rows, and so does from_csv.
  const Schedule read = Inference(rows).schedule(kind);
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
