// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/schedule.h>

#include <charconv>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// \file
/// One cell of a schedule as text, the same in the text form and in CSV.

namespace torch_sm3::pipeline {

/// An action has eight bits for the number of its route.
inline constexpr size_t kMostRoutes = 254;

/// One action, or the two of `(0F3;5B1)OVERLAP_F_B`. A message with a route
/// names the stage at its other end, because routes may not be known yet.
struct Cell {
  Action first;
  std::optional<Action> second;
  std::optional<uint16_t> other;
};

/// Reads a cell; nothing if any of it cannot be read.
///
/// \param text one cell, `.` for an idle slot
std::optional<Cell> parse_cell(std::string_view text);

/// What `parse_cell` reads, in words.
const char* cell_grammar();

/// The route of a message.
///
/// \param action a SEND or RECV
/// \param other  the stage at its other end
Route route_of(Action action, uint16_t other);

/// Numbers a message's route in its flags; false if the schedule has none such.
///
/// \param schedule what holds the routes
/// \param cell     a message
bool number_route(const Schedule& schedule, Cell* cell);

/// Says what is wrong with an action in a row of a schedule, or nothing.
///
/// \param schedule what the action stands in
/// \param rank     the row
/// \param action   the action
std::string misfit(const Schedule& schedule, uint32_t rank, Action action);

/// Reads a cell into a row.
///
/// \param schedule what the row stands in
/// \param rank     the row
/// \param column   number of the cell, for errors
/// \param text     the cell
/// \param row      what the actions are appended to
/// \throws ScheduleError naming row, column and cell
void push_cell(
    const Schedule& schedule,
    uint32_t rank,
    size_t column,
    std::string_view text,
    std::vector<Action>* row);

/// Reads `schedule 1 kind=...`, all of a schedule but its rows.
///
/// \param line the first line of the text form
/// \throws ScheduleError naming what it cannot read
Schedule parse_head(std::string_view line);

/// Writes the line that `parse_head` reads, without its end.
///
/// \param schedule what to describe
std::string head_of(const Schedule& schedule);

/// Puts routes and the members of ties in ascending order.
///
/// \param schedule what holds them
/// \throws ScheduleError if one goes to an earlier stage or one that is not
///     there, stands twice, or there are too many
void sort_routes(Schedule* schedule);

/// Appends the text of an action that is not one half of a pair.
///
/// \param out      where the text goes
/// \param schedule what the action stands in
/// \param action   the action
void append(std::string* out, const Schedule& schedule, Action action);

/// Appends the cell that starts at `index` and returns where the next starts.
///
/// \param out      where the text goes
/// \param schedule what the row stands in
/// \param row      the row
/// \param index    first action of the cell
size_t append_cell(
    std::string* out,
    const Schedule& schedule,
    const std::vector<Action>& row,
    size_t index);

/// Appends a number in decimal.
///
/// \param out    where the text goes
/// \param number the number
inline void append(std::string* out, uint32_t number) {
  char digits[10];
  const auto end = std::to_chars(digits, digits + sizeof digits, number).ptr;
  out->append(digits, end);
}

/// Takes the digits that `text` starts with; nothing if there are none, too
/// many or more of them than the one canonical spelling has.
///
/// \param text what is left to read
std::optional<uint32_t> take_number(std::string_view* text);

} // namespace torch_sm3::pipeline
