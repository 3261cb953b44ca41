// SPDX-License-Identifier: Apache-2.0
// Where the messages of a compute-only schedule go.
#include <torch_sm3/pipeline/schedule.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <tuple>

namespace torch_sm3::pipeline {
namespace {

constexpr uint32_t kNever = 0xffffffffu;

// A RECV and when its message leaves the sender.
struct Arrival {
  uint32_t sent = 0;
  Action action;
};

class Lowering {
 public:
  explicit Lowering(const Schedule& schedule) : schedule_(schedule) {}

  Schedule run() {
    time_actions();
    Schedule out = schedule_;
    collect_arrivals();
    for (uint32_t rank = 0; rank < schedule_.ranks; ++rank) {
      out.rows[rank] = place(rank);
    }
    return out;
  }

 private:
  size_t slot(Action action) const {
    const size_t kind = action.op == Op::kForward ? 0 : 1;
    return (kind * schedule_.stages + action.stage) * schedule_.microbatches +
           action.microbatch;
  }

  // The action whose result `action` needs from another stage.
  std::optional<Action> producer(Action action) const {
    if (action.op == Op::kForward && action.stage > 0) {
      --action.stage;
      return action;
    }
    if (action.op == Op::kBackward && action.stage + 1u < schedule_.stages) {
      ++action.stage;
      return action;
    }
    return std::nullopt;
  }

  bool crosses(Action from, Action to) const {
    return schedule_.placement[from.stage] != schedule_.placement[to.stage];
  }

  // Earliest start of `action` if all it needs is done, else kNever.
  uint32_t ready(Action action) const {
    uint32_t time = 0;
    const auto need = [&](Action other) {
      const uint32_t end = ends_[slot(other)];
      time = end == kNever || time == kNever ? kNever : std::max(time, end);
    };
    if (const std::optional<Action> other = producer(action)) {
      need(*other);
    }
    if (action.op == Op::kBackward) {
      need({Op::kForward, 0, action.stage, action.microbatch});
    }
    return time;
  }

  // Runs all rows at one unit of time per action. A rank that cannot go on is
  // looked at again when another rank has finished what it waits for.
  void time_actions() {
    ends_.assign(size_t{2} * schedule_.stages * schedule_.microbatches, kNever);
    starts_.resize(schedule_.ranks);
    std::vector<uint32_t> clocks(schedule_.ranks, 0);
    std::deque<uint32_t> runnable;
    for (uint32_t rank = 0; rank < schedule_.ranks; ++rank) {
      runnable.push_back(rank);
    }
    while (!runnable.empty()) {
      const uint32_t rank = runnable.front();
      runnable.pop_front();
      const auto& row = schedule_.rows[rank];
      auto& starts = starts_[rank];
      while (starts.size() < row.size()) {
        const Action action = row[starts.size()];
        uint32_t start = clocks[rank];
        if (action.op != Op::kIdle) {
          const uint32_t earliest = ready(action);
          if (earliest == kNever) {
            break;
          }
          start = std::max(start, earliest);
          finish(action, start + 1, &runnable);
        }
        clocks[rank] = start + 1;
        starts.push_back(start);
      }
    }
    check_finished();
  }

  void finish(Action action, uint32_t end, std::deque<uint32_t>* runnable) {
    uint32_t& known = ends_[slot(action)];
    if (known != kNever) {
      throw ScheduleError(
          "Schedule.lower: expected each action once, but got " + text(action) +
          " twice");
    }
    known = end;
    // Only the ranks of the neighbouring stages can have waited for it.
    if (action.stage > 0) {
      runnable->push_back(schedule_.placement[action.stage - 1u]);
    }
    if (action.stage + 1u < schedule_.stages) {
      runnable->push_back(schedule_.placement[action.stage + 1u]);
    }
  }

  void check_finished() const {
    std::string stuck;
    for (uint32_t rank = 0; rank < schedule_.ranks; ++rank) {
      const auto& row = schedule_.rows[rank];
      if (starts_[rank].size() < row.size()) {
        stuck += (stuck.empty() ? "" : ", ") + std::string("rank ") +
                 std::to_string(rank) + " waits at " +
                 text(row[starts_[rank].size()]);
      }
    }
    if (!stuck.empty()) {
      throw ScheduleError(
          "Schedule.lower: expected an order that can run, but got one where " +
          stuck);
    }
  }

  void collect_arrivals() {
    arrivals_.resize(schedule_.ranks);
    for (uint32_t rank = 0; rank < schedule_.ranks; ++rank) {
      for (const Action action : schedule_.rows[rank]) {
        const std::optional<Action> from =
            action.op == Op::kIdle ? std::nullopt : producer(action);
        if (from && crosses(*from, action)) {
          const Op op =
              action.op == Op::kForward ? Op::kRecvForward : Op::kRecvBackward;
          arrivals_[rank].push_back(
              {ends_[slot(*from)], {op, 0, action.stage, action.microbatch}});
        }
      }
      // One rank ends its actions at different times, so this keeps the order
      // of each link, and across both classes where they share two ranks.
      std::sort(
          arrivals_[rank].begin(),
          arrivals_[rank].end(),
          [](const Arrival& a, const Arrival& b) {
            const auto key = [](const Arrival& x) {
              return std::tuple(
                  x.sent, x.action.op, x.action.stage, x.action.microbatch);
            };
            return key(a) < key(b);
          });
    }
  }

  // The SEND that follows `action`, if its result is needed on another rank
  // (`schedule_` may hold a part of the stages' actions only, as `forward`).
  std::optional<Action> message_of(Action action) const {
    Action consumer = action;
    if (action.op == Op::kForward && action.stage + 1u < schedule_.stages) {
      ++consumer.stage;
    } else if (action.op == Op::kBackward && action.stage > 0) {
      --consumer.stage;
    } else {
      return std::nullopt;
    }
    if (!crosses(action, consumer) || ends_[slot(consumer)] == kNever) {
      return std::nullopt;
    }
    action.op =
        action.op == Op::kForward ? Op::kSendForward : Op::kSendBackward;
    return action;
  }

  std::vector<Action> place(uint32_t rank) const {
    const auto& row = schedule_.rows[rank];
    const auto& arrivals = arrivals_[rank];
    std::vector<Action> out;
    out.reserve(2 * row.size());
    size_t next = 0;
    std::optional<Action> send;
    for (size_t i = 0; i < row.size(); ++i) {
      // RECVs of the gap before this action, then the SEND of the last one.
      while (next < arrivals.size() &&
             arrivals[next].sent <= starts_[rank][i]) {
        out.push_back(arrivals[next++].action);
      }
      if (send) {
        out.push_back(*send);
      }
      out.push_back(row[i]);
      send = row[i].op == Op::kIdle ? std::nullopt : message_of(row[i]);
    }
    if (send) {
      out.push_back(*send);
    }
    return out;
  }

  const Schedule& schedule_;
  std::vector<uint32_t> ends_;
  std::vector<std::vector<uint32_t>> starts_;
  std::vector<std::vector<Arrival>> arrivals_;
};

} // namespace

Schedule Schedule::lower() const {
  return lowered() ? *this : Lowering(*this).run();
}

} // namespace torch_sm3::pipeline
