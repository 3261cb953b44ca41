// SPDX-License-Identifier: Apache-2.0
#include <schedule/timing.h>

#include <string>

namespace torch_sm3::pipeline {

Timing::Timing(const Schedule& schedule) : schedule_(schedule) {
  index_routes();
  mark_actions();
  starts_.resize(schedule_.ranks);
  clocks_.assign(schedule_.ranks, 0);
  waits_.assign(schedule_.ranks, kNothing);
  for (uint32_t rank = schedule_.ranks; rank > 0; --rank) {
    runnable_.push_back(rank - 1);
  }
  while (!runnable_.empty()) {
    const uint32_t rank = runnable_.back();
    runnable_.pop_back();
    run(rank);
  }
  check_finished();
}

void Timing::index_routes() {
  if (schedule_.routes.empty()) {
    return;
  }
  routes_.resize(size_t{2} * schedule_.stages);
  for (size_t i = 0; i < schedule_.routes.size(); ++i) {
    const Route route = schedule_.routes[i];
    routes_[route.source].push_back(static_cast<uint8_t>(i));
    routes_[schedule_.stages + route.target].push_back(static_cast<uint8_t>(i));
  }
}

// Notes which results there will be, so that nothing waits for one that no
// action makes.
void Timing::mark_actions() {
  size_t actions = 0;
  for (const auto& row : schedule_.rows) {
    actions += row.size();
    for (const Action action : row) {
      if (is_compute(action.op)) {
        microbatches_ = std::max(microbatches_, size_t{action.microbatch} + 1);
      }
    }
  }
  const size_t results = schedule_.stages * microbatches_;
  if (results / 64 > actions + 1024) {
    throw ScheduleError(
        "Schedule.lower: expected actions of most stages and microbatches, but "
        "got " +
        std::to_string(actions) + " for " + std::to_string(results));
  }
  ends_.assign(2 * results, kAbsent);
  weights_.assign(schedule_.stages, 0);
  weights_end_.assign(schedule_.stages, 0);
  std::vector<bool> weights(results);
  for (const auto& row : schedule_.rows) {
    for (const Action action : row) {
      if (action.op == Op::kForward) {
        expect(forward_slot(action.stage, action.microbatch), action);
      }
      if (gives_input_gradient(action.op)) {
        expect(gradient_slot(action.stage, action.microbatch), action);
      }
      if (gives_weight_gradient(action.op)) {
        const size_t slot = forward_slot(action.stage, action.microbatch);
        if (weights[slot]) {
          throw ScheduleError(
              "Schedule.lower: expected each action once, but got " +
              text(action) + " twice");
        }
        weights[slot] = true;
        ++weights_[action.stage];
      }
    }
  }
}

void Timing::expect(size_t slot, Action action) {
  if (ends_[slot] == kPending) {
    throw ScheduleError(
        "Schedule.lower: expected each action once, but got " + text(action) +
        " twice");
  }
  ends_[slot] = kPending;
}

// Runs a rank until it waits for another.
void Timing::run(uint32_t rank) {
  const auto& row = schedule_.rows[rank];
  auto& starts = starts_[rank];
  starts.reserve(row.size());
  while (starts.size() < row.size()) {
    const size_t first = starts.size();
    uint32_t start = clocks_[rank];
    if (is_message(row[first].op)) {
      starts.push_back(start);
      continue;
    }
    const size_t end = first + cell_size(row, first);
    for (size_t i = first; i < end; ++i) {
      if (!ready(rank, row[i], &start)) {
        return;
      }
    }
    uint32_t clock = start;
    for (size_t i = first; i < end; ++i) {
      clock += units(row[i].op);
      finish(row[i], clock);
      starts.push_back(start);
    }
    clocks_[rank] = clock;
  }
}

// Raises `start` to when a result is there; false, and the rank waits for it,
// if that is not known yet.
bool Timing::need(uint32_t rank, size_t slot, uint32_t* start) {
  if (ends_[slot] == kPending) {
    waits_[rank] = slot;
    return false;
  }
  *start = std::max(*start, ends_[slot]);
  return true;
}

bool Timing::ready(uint32_t rank, Action action, uint32_t* start) {
  const size_t stage = action.stage;
  const size_t microbatch = action.microbatch;
  if (action.op == Op::kForward) {
    if (stage > 0 && !need(rank, forward_slot(stage - 1, microbatch), start)) {
      return false;
    }
    for (const uint8_t route : routes_to(stage)) {
      const size_t source = schedule_.routes[route].source;
      if (!need(rank, forward_slot(source, microbatch), start)) {
        return false;
      }
    }
  } else if (gives_input_gradient(action.op)) {
    if (!need(rank, forward_slot(stage, microbatch), start) ||
        (stage + 1 < schedule_.stages &&
         !need(rank, gradient_slot(stage + 1, microbatch), start))) {
      return false;
    }
    for (const uint8_t route : routes_from(stage)) {
      const size_t target = schedule_.routes[route].target;
      if (!need(rank, gradient_slot(target, microbatch), start)) {
        return false;
      }
    }
  } else if (action.op == Op::kBackwardWeight) {
    return need(rank, gradient_slot(stage, microbatch), start);
  }
  return true;
}

void Timing::wake(uint32_t stage, size_t slot) {
  const uint32_t rank = schedule_.placement[stage];
  if (waits_[rank] == slot) {
    waits_[rank] = kNothing;
    runnable_.push_back(rank);
  }
}

void Timing::finish(Action action, uint32_t end) {
  const uint32_t stage = action.stage;
  if (action.op == Op::kForward) {
    const size_t slot = forward_slot(stage, action.microbatch);
    ends_[slot] = end;
    if (stage + 1 < schedule_.stages) {
      wake(stage + 1, slot);
    }
    for (const uint8_t route : routes_from(stage)) {
      wake(schedule_.routes[route].target, slot);
    }
  } else if (gives_input_gradient(action.op)) {
    const size_t slot = gradient_slot(stage, action.microbatch);
    ends_[slot] = end;
    if (stage > 0) {
      wake(stage - 1, slot);
    }
    for (const uint8_t route : routes_to(stage)) {
      wake(schedule_.routes[route].source, slot);
    }
  }
  if (gives_weight_gradient(action.op)) {
    weights_end_[stage] = end;
  }
}

void Timing::check_finished() const {
  constexpr size_t kMostNamed = 8;
  std::string stuck;
  size_t ranks = 0;
  for (uint32_t rank = 0; rank < schedule_.ranks; ++rank) {
    const size_t at = starts_[rank].size();
    if (at < schedule_.rows[rank].size() && ++ranks <= kMostNamed) {
      stuck += (ranks == 1 ? "rank " : ", rank ") + std::to_string(rank) +
               " waits at " + schedule_.text(schedule_.rows[rank][at]);
    }
  }
  if (ranks > kMostNamed) {
    stuck += " and " + std::to_string(ranks - kMostNamed) + " more ranks wait";
  }
  if (ranks > 0) {
    throw ScheduleError(
        "Schedule.lower: expected an order that can run, but got one where " +
        stuck);
  }
}

} // namespace torch_sm3::pipeline
