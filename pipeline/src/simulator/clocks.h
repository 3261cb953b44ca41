// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/simulator.h>
#include <verifier/fifo.h>
#include <verifier/greedy.h>

#include <algorithm>
#include <vector>

namespace torch_sm3::pipeline {

/// The simulator's clocks, for `Greedy`: one for each rank, and when each
/// message arrives.
class Clocks {
 public:
  /// \param program       what is run; must outlive this
  /// \param costs         of its actions and links; must outlive this
  /// \param with_timeline whether to keep all spans
  Clocks(const Program& program, const Costs& costs, bool with_timeline);

  struct Rank {
    double clock = 0;
    double busy = 0;
    double weights = 0; ///< part of busy that need not come before others' work
    double first = 0;   ///< start of the first action but messages
    double last = 0;    ///< end of the last
    bool started = false;

   private:
    friend class Clocks;
    double begun = 0; // clock before the message that is handled
    double ready = 0; // when all that the next action needs is here
    // The F of a pair that runs as two, until the compute action after its B.
    bool half_open = false;
    bool half_next = false; // its B comes next
    Action half;
    double half_end = 0;
  };

  const std::vector<Rank>& ranks() const {
    return ranks_;
  }

  std::vector<std::vector<Span>> take_timeline() {
    return std::move(timeline_);
  }

  bool optimizer_waits() const {
    return costs_.optimizer_waits;
  }

  bool fuses(Action first) const {
    return costs_.of(first.stage).pair.has_value();
  }

  void need(uint32_t rank, size_t slot) {
    ranks_[rank].ready = std::max(ranks_[rank].ready, arrivals_[slot]);
  }

  void compute(uint32_t rank, Action action) {
    Rank& on = ranks_[rank];
    const bool second = on.half_next;
    on.half_next = false;
    on.half_open &= second;
    const double start = std::max(on.clock, on.ready);
    spend(rank, start, duration(action), action.op);
    if ((action.flags & kPaired) != 0) {
      on.half_open = on.half_next = true;
      on.half = action;
      on.half_end = on.clock;
    }
  }

  void pair(uint32_t rank, Action first, Action) {
    Rank& on = ranks_[rank];
    on.half_open = on.half_next = false;
    const double cost = *costs_.of(first.stage).pair / costs_.of_rank(rank);
    const double start = std::max(on.clock, on.ready);
    spend(rank, start, cost * jitter(first), first.op);
    if (with_timeline_) {
      timeline_[rank].push_back(timeline_[rank].back());
    }
  }

  void
  send(uint32_t rank, Action action, uint32_t edge, size_t slot, bool waits);

  void matched(uint32_t rank, uint32_t channel) {
    ranks_[rank].clock = std::max(ranks_[rank].clock, posts_[channel].pop());
  }

  void post(uint32_t rank, uint32_t channel, bool keep) {
    ranks_[rank].begun = ranks_[rank].clock;
    if (keep) {
      posts_[channel].push(ranks_[rank].clock);
    }
  }

  void done(uint32_t rank) {
    if (with_timeline_) {
      timeline_[rank].push_back({ranks_[rank].begun, ranks_[rank].clock});
    }
  }

  void come(uint32_t rank, size_t collective) {
    starts_[collective] = std::max(starts_[collective], ranks_[rank].clock);
  }

  void meet(uint32_t rank, size_t collective, Action action);
  void other(uint32_t rank, Action action);

 private:
  void spend(uint32_t rank, double start, double duration, Op op) {
    Rank& on = ranks_[rank];
    if (!on.started) {
      on.started = true;
      on.first = start;
    }
    on.clock = on.last = start + duration;
    on.ready = 0;
    on.busy += duration;
    if (op != Op::kForward && !gives_input_gradient(op)) {
      on.weights += duration;
    }
    if (with_timeline_) {
      timeline_[rank].push_back({start, on.clock});
    }
  }

  double duration(Action action) const {
    const size_t row =
        static_cast<size_t>(action.op) - static_cast<size_t>(Op::kForward);
    const size_t stages = program_.schedule().stages;
    return durations_[row * stages + action.stage] * jitter(action);
  }

  double jitter(Action action) const {
    return costs_.jitter == 0 ? 1 : 1 + costs_.jitter * chance(action);
  }

  double chance(Action action) const;

  const Program& program_;
  const Costs& costs_;
  const bool with_timeline_;
  std::vector<Rank> ranks_;
  std::vector<std::vector<Span>> timeline_;
  // By operation, from F to W, and stage.
  std::vector<double> durations_;
  std::vector<double> optimizers_; // by rank
  std::vector<double> hops_;       // by edge
  std::vector<double> arrivals_;   // by slot
  std::vector<Fifo> posts_;        // of RECVs, by channel
  std::vector<double> wires_;      // by link: when it is free
  std::vector<double> starts_;     // by collective
};

/// Time of a message on an edge, from SEND to arrival.
///
/// \param schedule the schedule
/// \param costs    its costs
/// \param edge     an edge between two ranks
double hop(const Schedule& schedule, const Costs& costs, const Edge& edge);

} // namespace torch_sm3::pipeline
