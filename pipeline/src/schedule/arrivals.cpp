// SPDX-License-Identifier: Apache-2.0
#include <schedule/arrivals.h>

#include <algorithm>
#include <tuple>

namespace torch_sm3::pipeline {

void Arrivals::collect(uint32_t rank) {
  forward_.clear();
  backward_.clear();
  next_forward_ = next_backward_ = 0;
  for (const Action action : schedule_.rows[rank]) {
    if (action.op == Op::kForward) {
      collect_inputs(action);
    } else if (gives_input_gradient(action.op)) {
      collect_gradients(action);
    }
  }
  sort(&forward_);
  sort(&backward_);
}

void Arrivals::collect_inputs(Action action) {
  action.op = Op::kRecvForward;
  action.flags = 0;
  const size_t microbatch = action.microbatch;
  if (action.stage > 0) {
    const size_t source = action.stage - 1u;
    expect(timing_.output(source, microbatch), source, action, &forward_);
  }
  for (const uint8_t route : timing_.routes_to(action.stage)) {
    const size_t source = schedule_.routes[route].source;
    action.flags = static_cast<uint8_t>(route + 1);
    expect(timing_.output(source, microbatch), source, action, &forward_);
  }
}

void Arrivals::collect_gradients(Action action) {
  action.op = Op::kRecvBackward;
  action.flags = 0;
  const size_t microbatch = action.microbatch;
  if (action.stage + 1u < schedule_.stages) {
    const size_t source = action.stage + 1u;
    expect(timing_.gradient(source, microbatch), source, action, &backward_);
  }
  for (const uint8_t route : timing_.routes_from(action.stage)) {
    const size_t source = schedule_.routes[route].target;
    action.flags = static_cast<uint8_t>(route + 1);
    expect(timing_.gradient(source, microbatch), source, action, &backward_);
  }
}

void Arrivals::expect(uint32_t sent, size_t from, Action action, List* arrivals)
    const {
  if (sent != Timing::kAbsent &&
      schedule_.placement[from] != schedule_.placement[action.stage]) {
    arrivals->push_back({sent, action});
  }
}

// A rank's cells end at different times, and what one cell sends is told apart
// by the route, so this is the order of sending on each link. Rows in
// microbatch order have it already.
void Arrivals::sort(List* arrivals) {
  const auto before = [](const Arrival& a, const Arrival& b) {
    const auto key = [](const Arrival& x) {
      return std::tuple(
          x.sent, x.action.flags, x.action.stage, x.action.microbatch);
    };
    return key(a) < key(b);
  };
  if (!std::is_sorted(arrivals->begin(), arrivals->end(), before)) {
    std::sort(arrivals->begin(), arrivals->end(), before);
  }
}

void Arrivals::place(uint32_t start, std::vector<Action>* row) {
  const auto due = [&](const List& arrivals, size_t next) {
    return next < arrivals.size() && arrivals[next].sent <= start;
  };
  while (true) {
    const bool forward = due(forward_, next_forward_);
    const bool backward = due(backward_, next_backward_);
    if (forward && (!backward || forward_[next_forward_].sent <=
                                     backward_[next_backward_].sent)) {
      row->push_back(forward_[next_forward_++].action);
    } else if (backward) {
      row->push_back(backward_[next_backward_++].action);
    } else {
      return;
    }
  }
}

} // namespace torch_sm3::pipeline
