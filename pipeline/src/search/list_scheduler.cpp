// SPDX-License-Identifier: Apache-2.0
#include <search/list_scheduler.h>

#include <search/list_room.h>
#include <simulator/clocks.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>

namespace torch_sm3::pipeline {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

class ListScheduler {
 public:
  ListScheduler(
      const Schedule& shape,
      const Costs& costs,
      const ListPolicy& policy)
      : shape_(shape),
        costs_(costs),
        policy_(policy),
        m_(shape.microbatches),
        stages_(shape.stages),
        own_(shape.ranks),
        clocks_(shape.ranks),
        looks_(shape.ranks, kNever),
        room_(shape, policy),
        rows_(shape.ranks) {
    for (uint32_t s = 0; s < shape.stages; ++s) {
      Stage& stage = stages_[s];
      stage.rank = shape.placement[s];
      stage.inputs_at.assign(m_, s == 0 ? 0 : kNever);
      stage.gradients_at.assign(m_, kNever);
      stage.down = time_between(s, s + 1);
      stage.up = s > 0 ? time_between(s, s - 1) : 0;
      own_[stage.rank].push_back(s);
    }
  }

  std::vector<std::vector<Action>> run() {
    for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
      rows_[rank].reserve(size_t{3} * own_[rank].size() * m_);
      look_at(rank, 0);
    }
    uint64_t left = uint64_t{3} * shape_.stages * m_;
    while (left > 0) {
      if (events_.empty()) {
        throw std::logic_error("plan: no rank of the list can go on");
      }
      const auto [now, rank] = events_.top();
      events_.pop();
      if (now != looks_[rank]) {
        continue; // it was looked at before
      }
      looks_[rank] = kNever;
      if (step(rank, now)) {
        --left;
      }
    }
    return std::move(rows_);
  }

 private:
  struct Stage {
    uint32_t rank = 0;
    uint32_t forwards = 0; // done so far
    uint32_t inputs = 0;
    uint32_t weights = 0;
    // When the input, and the gradient of the output, of each microbatch is
    // there.
    std::vector<double> inputs_at;
    std::vector<double> gradients_at;
    double down = 0; // time of a message to the next stage
    double up = 0;   // and to the one before
  };

  double time_between(uint32_t from, uint32_t to) const {
    if (to >= shape_.stages || shape_.placement[from] == shape_.placement[to]) {
      return 0;
    }
    Edge edge;
    edge.source = static_cast<uint16_t>(from);
    edge.target = static_cast<uint16_t>(to);
    edge.from = shape_.placement[from];
    edge.to = shape_.placement[to];
    return hop(shape_, costs_, edge);
  }

  double forward_at(const Stage& stage) const {
    return stage.forwards < m_ ? stage.inputs_at[stage.forwards] : kNever;
  }
  double input_at(const Stage& stage) const {
    return stage.inputs < m_ ? stage.gradients_at[stage.inputs] : kNever;
  }
  bool has_room(uint32_t s) const {
    const Stage& stage = stages_[s];
    return room_.for_forward(s, stage.forwards - stage.weights);
  }
  // Where there is no room for an input gradient, a weight gradient comes first
  // if one is owed.
  bool may_input(uint32_t rank, uint32_t s) const {
    return room_.for_input(s) ||
           std::none_of(own_[rank].begin(), own_[rank].end(), [&](uint32_t of) {
             return stages_[of].weights < stages_[of].inputs;
           });
  }

  // The place of the next action of a stage in the plan that is followed.
  uint32_t place(size_t part, uint32_t s, uint32_t microbatch) const {
    return policy_.order[(part * shape_.stages + s) * m_ + microbatch];
  }

  // Of what is ready, the action that is first in the plan that is followed.
  bool follow(uint32_t rank, double now, double* next) {
    uint32_t first = ~0u;
    Op op = Op::kIdle;
    uint32_t of = 0;
    const auto offer = [&](Op what, size_t part, uint32_t s, uint32_t i) {
      const uint32_t at = place(part, s, i);
      if (at < first) {
        first = at;
        op = what;
        of = s;
      }
    };
    const auto ready = [&](double at) {
      *next = at > now ? std::min(*next, at) : *next;
      return at <= now;
    };
    uint32_t forward = ~0u;
    for (const uint32_t s : own_[rank]) {
      const Stage& stage = stages_[s];
      if (stage.forwards < m_ &&
          (forward == ~0u ||
           place(0, s, stage.forwards) <
               place(0, forward, stages_[forward].forwards))) {
        forward = s;
      }
      if (may_input(rank, s) && ready(input_at(stage))) {
        offer(Op::kBackwardInput, 1, s, stage.inputs);
      }
      if (stage.weights < stage.inputs) {
        offer(Op::kBackwardWeight, 2, s, stage.weights);
      }
    }
    if (forward != ~0u && has_room(forward) &&
        ready(forward_at(stages_[forward]))) {
      offer(Op::kForward, 0, forward, stages_[forward].forwards);
    }
    return op != Op::kIdle && act(op, of, now);
  }

  // Takes the best action that is ready; else comes back when the next will be.
  bool step(uint32_t rank, double now) {
    const std::vector<uint32_t>& own = own_[rank];
    double next = kNever;
    const auto ready = [&](double at) {
      next = at > now ? std::min(next, at) : next;
      return at <= now;
    };
    const auto forward = [&](size_t first) {
      for (size_t k = own.size(); k-- > first;) {
        if (has_room(own[k]) && ready(forward_at(stages_[own[k]]))) {
          return act(Op::kForward, own[k], now);
        }
      }
      return false;
    };
    const auto input = [&] {
      for (size_t k = own.size(); k-- > 0;) {
        if (may_input(rank, own[k]) && ready(input_at(stages_[own[k]]))) {
          return act(Op::kBackwardInput, own[k], now);
        }
      }
      return false;
    };
    const bool acted = !policy_.order.empty()
                           ? follow(rank, now, &next)
                           : (policy_.forwards_first && forward(1)) ||
                                 input() || forward(0) || weight(own, now);
    if (acted) {
      return true;
    }
    if (next < kNever) {
      look_at(rank, next);
    }
    return false;
  }

  bool weight(const std::vector<uint32_t>& own, double now) {
    const auto owed = [&](uint32_t s) {
      return stages_[s].inputs - stages_[s].weights;
    };
    const uint32_t most = *std::max_element(
        own.rbegin(), own.rend(), [&](uint32_t a, uint32_t b) {
          return owed(a) < owed(b);
        });
    return owed(most) > 0 && act(Op::kBackwardWeight, most, now);
  }

  bool act(Op op, uint32_t s, double now) {
    Stage& stage = stages_[s];
    const StageCosts& of = costs_.of(s);
    double end = now;
    uint32_t i = 0;
    if (op == Op::kForward) {
      i = stage.forwards++;
      end += of.forward / costs_.of_rank(stage.rank);
      room_.forward(s);
      if (s + 1 < shape_.stages) {
        arrive(&stages_[s + 1].inputs_at[i], s + 1, end + stage.down);
      } else {
        stage.gradients_at[i] = end;
      }
    } else if (op == Op::kBackwardInput) {
      i = stage.inputs++;
      end += of.input_gradient() / costs_.of_rank(stage.rank);
      room_.input(s);
      if (s > 0) {
        arrive(&stages_[s - 1].gradients_at[i], s - 1, end + stage.up);
      }
    } else {
      i = stage.weights++;
      end += of.weight / costs_.of_rank(stage.rank);
      room_.weight(s);
    }
    rows_[stage.rank].push_back({op, 0, static_cast<uint16_t>(s), i});
    clocks_[stage.rank] = end;
    look_at(stage.rank, end);
    return true;
  }

  // A rank is looked at when it is free and the first thing it may wait for is
  // there; what comes before that brings no event of its own.
  void look_at(uint32_t rank, double time) {
    time = std::max(time, clocks_[rank]);
    if (time < looks_[rank]) {
      looks_[rank] = time;
      events_.emplace(time, rank);
    }
  }

  void arrive(double* when, uint32_t s, double time) {
    *when = time;
    look_at(stages_[s].rank, time);
  }

  const Schedule& shape_;
  const Costs& costs_;
  const ListPolicy& policy_;
  uint32_t m_;
  std::vector<Stage> stages_;
  std::vector<std::vector<uint32_t>> own_; // stages of each rank, ascending
  std::vector<double> clocks_;
  std::vector<double> looks_; // when each rank is looked at next
  ListRoom room_;
  std::vector<std::vector<Action>> rows_;
  using Event = std::pair<double, uint32_t>;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
};

} // namespace

std::vector<std::vector<Action>> schedule_list(
    const Schedule& shape,
    const Costs& costs,
    const ListPolicy& policy) {
  return ListScheduler(shape, costs, policy).run();
}

} // namespace torch_sm3::pipeline
