// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/schedule.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

/// \file
/// Rows and cells of CSV.

namespace torch_sm3::pipeline {

/// Throws ScheduleError.
///
/// \param reader   function of Schedule
/// \param expected what should be there
/// \param cell     what is
/// \param row      number of its row
/// \param column   number of its cell
[[noreturn]] void refuse_cell(
    const char* reader,
    const std::string& expected,
    std::string_view cell,
    size_t row,
    size_t column);

/// Removes blanks at both ends.
///
/// \param text any text
std::string_view strip(std::string_view text);

/// Cuts off the first line of a text; nothing if none is left.
///
/// \param text what is left of it
std::optional<std::string_view> take_line(std::string_view* text);

/// Calls `use` with the number and text of each cell of a line.
///
/// \param line a row
/// \param use  what to call
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

/// Calls `use` with number and text of each line that is a row.
///
/// \param text a file
/// \param use  what to call
template <class Use>
void each_row(std::string_view text, const Use& use) {
  size_t row = 0;
  while (const std::optional<std::string_view> line = take_line(&text)) {
    if (line->empty() || line->front() != '#') {
      use(row++, *line);
    }
  }
}

/// Makes the schedule, without its rows, that the cells of a file belong to.
///
/// \param text a file
/// \param kind name of the schedule
/// \throws ScheduleError naming row, column and cell of what cannot be
Schedule infer(std::string_view text, const std::string& kind);

} // namespace torch_sm3::pipeline
