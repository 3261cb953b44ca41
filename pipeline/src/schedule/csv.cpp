// SPDX-License-Identifier: Apache-2.0
#include <schedule/csv.h>

#include <algorithm>

namespace torch_sm3::pipeline {

void refuse_cell(
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

} // namespace torch_sm3::pipeline
