// SPDX-License-Identifier: Apache-2.0
#include <verifier/grid.h>

#include <algorithm>
#include <set>

namespace torch_sm3::pipeline {
namespace {

constexpr size_t kAround = 3;
// As many columns as a screen has, and links of a chain as one can follow.
constexpr size_t kMostColumns = 8;
constexpr size_t kMostLinks = 8;

std::vector<uint32_t> columns_of(
    const Schedule& schedule,
    const std::vector<Mark>& marks,
    bool full) {
  std::vector<uint32_t> columns;
  if (full || schedule.ranks <= kMostColumns) {
    for (uint32_t rank = 0; rank < schedule.ranks; ++rank) {
      columns.push_back(rank);
    }
    return columns;
  }
  for (size_t i = 0; i < std::min(marks.size(), kMostColumns); ++i) {
    columns.push_back(marks[i].rank);
  }
  std::sort(columns.begin(), columns.end());
  columns.erase(std::unique(columns.begin(), columns.end()), columns.end());
  return columns;
}

std::set<size_t>
steps_of(const Schedule& schedule, const std::vector<Mark>& marks, bool full) {
  std::set<size_t> steps;
  size_t most = 0;
  for (const auto& row : schedule.rows) {
    most = std::max(most, row.size());
  }
  if (full) {
    for (size_t step = 0; step < most; ++step) {
      steps.insert(steps.end(), step);
    }
  }
  for (size_t i = 0; !full && i < std::min(marks.size(), kMostColumns); ++i) {
    const size_t at = marks[i].at;
    const size_t first = at - std::min(at, kAround);
    for (size_t step = first; step <= at + kAround && step < most; ++step) {
      steps.insert(step);
    }
  }
  return steps;
}

// One cell; a half of a pair has the bracket of its side.
std::string cell(const Schedule& schedule, uint32_t rank, size_t at) {
  const auto& row = schedule.rows[rank];
  if (at >= row.size()) {
    return "";
  }
  const auto pairs = [&](size_t i) {
    return is_compute(row[i].op) && (row[i].flags & kPaired) != 0;
  };
  std::string text = schedule.text(row[at]);
  if (pairs(at)) {
    return "(" + text + ";";
  }
  return at > 0 && pairs(at - 1) ? text + ")" : text;
}

class Table {
 public:
  void add(std::vector<std::string> line) {
    widths_.resize(std::max(widths_.size(), line.size()));
    for (size_t i = 0; i < line.size(); ++i) {
      widths_[i] = std::max(widths_[i], line[i].size());
    }
    lines_.push_back(std::move(line));
  }

  std::string text() const {
    std::string out;
    for (const auto& line : lines_) {
      std::string written;
      for (size_t i = 0; i < line.size(); ++i) {
        written += line[i] + std::string(widths_[i] - line[i].size() + 2, ' ');
      }
      written.erase(written.find_last_not_of(' ') + 1);
      out += written + "\n";
    }
    return out;
  }

 private:
  std::vector<std::vector<std::string>> lines_;
  std::vector<size_t> widths_;
};

// The rank that has to act before a stuck rank can go on.
uint32_t waited_for(
    const Program& program,
    const std::vector<Stop>& stops,
    uint32_t rank) {
  const Stop& stop = stops[rank];
  if (stop.wait == Wait::kMessage) {
    return program.edges()[stop.what / program.schedule().microbatches].from;
  }
  if (stop.wait == Wait::kSlot) {
    return program.edges()[stop.what].to;
  }
  const auto members = members_of(program.schedule());
  for (const uint32_t member : members[stop.what]) {
    const Stop& other = stops[member];
    if (other.wait != Wait::kMembers || other.what != stop.what) {
      return member;
    }
  }
  return rank;
}

std::string place(
    const Program& program,
    const std::vector<Stop>& stops,
    uint32_t rank,
    bool direct) {
  const Schedule& schedule = program.schedule();
  const Stop& stop = stops[rank];
  if (stop.wait == Wait::kMessage && !direct) {
    const size_t m = schedule.microbatches;
    return schedule.text(program.message(
        static_cast<uint32_t>(stop.what / m),
        static_cast<uint32_t>(stop.what % m),
        false));
  }
  return schedule.text(schedule.rows[rank][stop.at]);
}

// Ranks that wait for each other, in order, from the lowest stuck rank on.
std::vector<uint32_t>
cycle(const Program& program, const std::vector<Stop>& stops) {
  std::vector<uint32_t> path;
  std::vector<bool> seen(stops.size());
  uint32_t rank = 0;
  while (rank < stops.size() && stops[rank].wait == Wait::kNothing) {
    ++rank;
  }
  while (rank < stops.size() && stops[rank].wait != Wait::kNothing &&
         !seen[rank]) {
    seen[rank] = true;
    path.push_back(rank);
    rank = waited_for(program, stops, rank);
  }
  const auto start = std::find(path.begin(), path.end(), rank);
  return start == path.end() ? path : std::vector<uint32_t>(start, path.end());
}

} // namespace

std::string
grid(const Schedule& schedule, const std::vector<Mark>& marks, bool full) {
  const std::vector<uint32_t> columns = columns_of(schedule, marks, full);
  Table table;
  std::vector<std::string> line{"step"};
  for (const uint32_t rank : columns) {
    line.push_back("rank " + std::to_string(rank));
  }
  table.add(std::move(line));
  size_t next = 0;
  for (const size_t step : steps_of(schedule, marks, full)) {
    if (step != next) {
      table.add({"..."});
    }
    next = step + 1;
    line = {std::to_string(step)};
    for (const uint32_t rank : columns) {
      const bool marked =
          std::any_of(marks.begin(), marks.end(), [&](const Mark& mark) {
            return mark.rank == rank && mark.at == step;
          });
      const std::string text = cell(schedule, rank, step);
      line.push_back(marked ? "[" + text + "]" : text);
    }
    table.add(std::move(line));
  }
  return table.text();
}

Waiting
waiting(const Program& program, const std::vector<Stop>& stops, bool direct) {
  const std::vector<uint32_t> ranks = cycle(program, stops);
  Waiting result;
  for (size_t i = 0; i < ranks.size(); ++i) {
    result.marks.push_back({ranks[i], stops[ranks[i]].at});
    if (i < kMostLinks) {
      const uint32_t other = waited_for(program, stops, ranks[i]);
      result.words +=
          (i == 0 ? "rank " + std::to_string(ranks[i]) + " waits at "
                  : ", which is stuck at ") +
          place(program, stops, ranks[i], direct) +
          (i == 0 ? " for rank " : " and waits for rank ") +
          std::to_string(other);
    }
  }
  if (ranks.size() > kMostLinks) {
    result.words +=
        ", and so on around " + std::to_string(ranks.size()) + " ranks";
  }
  for (uint32_t rank = 0; rank < stops.size(); ++rank) {
    const bool known =
        std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
    if (stops[rank].wait != Wait::kNothing && !known) {
      result.marks.push_back({rank, stops[rank].at});
    }
  }
  return result;
}

} // namespace torch_sm3::pipeline
