// SPDX-License-Identifier: Apache-2.0
#include <schedule/cells.h>

#include <algorithm>
#include <array>
#include <limits>

namespace torch_sm3::pipeline {
namespace {

// Which numbers stand around the name of an operation.
struct Spelling {
  Op op;
  const char* text;
  bool stage;
  bool number;
};
constexpr std::array<Spelling, kOps> kSpellings{{
    {Op::kIdle, ".", false, false},
    {Op::kForward, "F", true, true},
    {Op::kBackward, "B", true, true},
    {Op::kBackwardInput, "I", true, true},
    {Op::kBackwardWeight, "W", true, true},
    {Op::kSendForward, "SEND_F", true, true},
    {Op::kRecvForward, "RECV_F", true, true},
    {Op::kSendBackward, "SEND_B", true, true},
    {Op::kRecvBackward, "RECV_B", true, true},
    {Op::kReduceGrad, "REDUCE_GRAD", true, false},
    {Op::kTieReduce, "TIE_REDUCE", true, true},
    {Op::kOptimizer, "OPTIM", false, false},
    {Op::kValidate, "VALIDATE", false, false},
    {Op::kUnshard, "UNSHARD", true, false},
    {Op::kReshard, "RESHARD", true, false},
}};
constexpr std::string_view kPairName = ")OVERLAP_F_B";

const Spelling& spelling(Op op) {
  return kSpellings[static_cast<size_t>(op)];
}

bool is_send(Op op) {
  return op == Op::kSendForward || op == Op::kSendBackward;
}

const Spelling* take_name(std::string_view* text) {
  const auto* end = std::find_if(text->begin(), text->end(), [](char c) {
    return c != '_' && c != '.' && (c < 'A' || c > 'Z');
  });
  const std::string_view word =
      text->substr(0, static_cast<size_t>(end - text->begin()));
  text->remove_prefix(word.size());
  for (const Spelling& candidate : kSpellings) {
    if (word == candidate.text) {
      return &candidate;
    }
  }
  return nullptr;
}

std::optional<uint16_t> take_stage(std::string_view* text) {
  const std::optional<uint32_t> stage = take_number(text);
  if (!stage || *stage > std::numeric_limits<uint16_t>::max()) {
    return std::nullopt;
  }
  return static_cast<uint16_t>(*stage);
}

// Reads an action from the start of `text`.
std::optional<Cell> take_action(std::string_view* text) {
  const std::optional<uint16_t> stage = take_stage(text);
  const Spelling* found = take_name(text);
  if (found == nullptr || found->stage != stage.has_value()) {
    return std::nullopt;
  }
  Cell cell;
  cell.first.op = found->op;
  cell.first.stage = stage.value_or(0);
  if (found->number) {
    const std::optional<uint32_t> number = take_number(text);
    if (!number) {
      return std::nullopt;
    }
    cell.first.microbatch = *number;
  }
  const char arrow = is_send(found->op) ? '>' : '<';
  if (is_message(found->op) && !text->empty() && text->front() == arrow) {
    text->remove_prefix(1);
    cell.other = take_stage(text);
    if (!cell.other) {
      return std::nullopt;
    }
  }
  return cell;
}

std::optional<Cell> take_pair(std::string_view* text) {
  text->remove_prefix(1);
  std::optional<Cell> cell = take_action(text);
  if (!cell || cell->first.op != Op::kForward || text->empty() ||
      text->front() != ';') {
    return std::nullopt;
  }
  text->remove_prefix(1);
  const std::optional<Cell> second = take_action(text);
  if (!second || !gives_input_gradient(second->first.op) ||
      text->substr(0, kPairName.size()) != kPairName) {
    return std::nullopt;
  }
  text->remove_prefix(kPairName.size());
  cell->first.flags = kPaired;
  cell->second = second->first;
  return cell;
}

} // namespace

const char* name(Op op) {
  return spelling(op).text;
}

std::string text(Action action) {
  std::string out;
  append(&out, Schedule{}, action);
  return out;
}

std::optional<uint32_t> take_number(std::string_view* text) {
  uint32_t value = 0;
  const char* begin = text->data();
  const auto [end, error] = std::from_chars(begin, begin + text->size(), value);
  const auto length = static_cast<size_t>(end - begin);
  if (error != std::errc{} || (length > 1 && *begin == '0')) {
    return std::nullopt;
  }
  text->remove_prefix(length);
  return value;
}

std::optional<Cell> parse_cell(std::string_view text) {
  if (text.empty()) {
    return std::nullopt;
  }
  const std::optional<Cell> cell =
      text.front() == '(' ? take_pair(&text) : take_action(&text);
  return text.empty() ? cell : std::nullopt;
}

const char* cell_grammar() {
  return "an action such as 2F0, 2B0, 2I0, 2W0, 2SEND_F0, 2RECV_B0, "
         "0SEND_F3>2, "
         "0REDUCE_GRAD, 0TIE_REDUCE1, 0UNSHARD, 0RESHARD, OPTIM, VALIDATE, "
         "(0F3;5B1)OVERLAP_F_B or '.'";
}

Route route_of(Action action, uint16_t other) {
  // Activations travel from source to target, gradients back.
  const bool at_source =
      action.op == Op::kSendForward || action.op == Op::kRecvBackward;
  return at_source ? Route{action.stage, other} : Route{other, action.stage};
}

bool number_route(const Schedule& schedule, Cell* cell) {
  if (!cell->other) {
    return true;
  }
  const Route route = route_of(cell->first, *cell->other);
  const auto found =
      std::lower_bound(schedule.routes.begin(), schedule.routes.end(), route);
  if (found == schedule.routes.end() || *found != route) {
    return false;
  }
  cell->first.flags =
      static_cast<uint8_t>(1 + (found - schedule.routes.begin()));
  return true;
}

std::string misfit(const Schedule& schedule, uint32_t rank, Action action) {
  const Spelling& kind = spelling(action.op);
  if (!kind.stage) {
    return "";
  }
  if (action.stage >= schedule.stages) {
    return "a stage below " + std::to_string(schedule.stages);
  }
  if (schedule.placement[action.stage] != rank) {
    return "a stage of rank " + std::to_string(rank) + " (stage " +
           std::to_string(action.stage) + " is on rank " +
           std::to_string(schedule.placement[action.stage]) + ")";
  }
  if (action.op == Op::kTieReduce) {
    if (action.microbatch >= schedule.ties.size()) {
      return "a tie below " + std::to_string(schedule.ties.size());
    }
    const auto& members = schedule.ties[action.microbatch];
    return std::find(members.begin(), members.end(), action.stage) !=
                   members.end()
               ? ""
               : "a stage of tie " + std::to_string(action.microbatch);
  }
  if (kind.number && action.microbatch >= schedule.microbatches) {
    return "a microbatch below " + std::to_string(schedule.microbatches);
  }
  return "";
}

void append(std::string* out, const Schedule& schedule, Action action) {
  const Spelling& kind = spelling(action.op);
  if (kind.stage) {
    append(out, action.stage);
  }
  out->append(kind.text);
  if (kind.number) {
    append(out, action.microbatch);
  }
  if (is_message(action.op) && action.flags > 0 &&
      action.flags <= schedule.routes.size()) {
    const Route route = schedule.routes[action.flags - 1u];
    out->push_back(is_send(action.op) ? '>' : '<');
    append(out, action.stage == route.source ? route.target : route.source);
  }
}

size_t append_cell(
    std::string* out,
    const Schedule& schedule,
    const std::vector<Action>& row,
    size_t index) {
  if (!is_compute(row[index].op) || (row[index].flags & kPaired) == 0 ||
      index + 1 == row.size()) {
    append(out, schedule, row[index]);
    return index + 1;
  }
  out->push_back('(');
  append(out, schedule, row[index]);
  out->push_back(';');
  append(out, schedule, row[index + 1]);
  out->append(kPairName);
  return index + 2;
}

} // namespace torch_sm3::pipeline
