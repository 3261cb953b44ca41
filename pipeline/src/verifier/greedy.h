// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/costs.h>
#include <verifier/program.h>
#include <verifier/stops.h>

#include <vector>

/// \file
/// Runs all rows of a schedule, each as far as it can. What an action waits for
/// never goes away again once it is there, so every order of running ends in
/// the same place: one run decides whether the schedule deadlocks.

namespace torch_sm3::pipeline {

/// Clocks of a run where only the order matters.
struct Untimed {
  bool optimizer_waits() const {
    return false;
  }
  bool fuses(Action) const {
    return true;
  }
  void need(uint32_t, size_t) {}
  void compute(uint32_t, Action) {}
  void pair(uint32_t, Action, Action) {}
  void send(uint32_t, Action, uint32_t, size_t, bool) {}
  void matched(uint32_t, uint32_t) {}
  void post(uint32_t, uint32_t, bool) {}
  void done(uint32_t) {}
  void come(uint32_t, size_t) {}
  void meet(uint32_t, size_t, Action) {}
  void other(uint32_t, Action) {}
};

/// \tparam Clocks what time everything takes: `Untimed`, or the simulator's
template <class Clocks>
class Greedy {
 public:
  /// \param program rows and edges; must outlive this
  /// \param links   how messages are posted and matched
  /// \param clocks  what time everything takes; must outlive this
  /// \param direct  ignore messages and collectives: what a stage makes is at
  ///     once where it is needed
  Greedy(
      const Program& program,
      LinkModel links,
      Clocks& clocks,
      bool direct = false)
      : program_(program),
        rows_(program.schedule().rows),
        links_(links),
        clocks_(clocks),
        direct_(direct),
        stops_(rows_.size()),
        here_(program.slots()),
        sent_(program.channels()),
        received_(program.channels()),
        members_(members_of(program.schedule())),
        came_(members_.size()) {}

  /// Runs everything; tells whether every row came to its end.
  bool run() {
    for (size_t rank = rows_.size(); rank > 0; --rank) {
      runnable_.push_back(static_cast<uint32_t>(rank - 1));
    }
    while (!runnable_.empty()) {
      const uint32_t rank = runnable_.back();
      runnable_.pop_back();
      advance(rank);
    }
    for (size_t rank = 0; rank < rows_.size(); ++rank) {
      if (stops_[rank].at < rows_[rank].size()) {
        return false;
      }
    }
    return true;
  }

  /// Where each rank stopped.
  const std::vector<Stop>& stops() const {
    return stops_;
  }

 private:
  void advance(uint32_t rank) {
    const std::vector<Action>& row = rows_[rank];
    Stop& stop = stops_[rank];
    stop.wait = Wait::kNothing;
    while (stop.at < row.size()) {
      const size_t steps = act(rank, row, stop);
      if (steps == 0) {
        return;
      }
      stop.at += steps;
      stop.begun = false;
    }
  }

  // Number of actions that were done; 0 if the rank has to wait.
  size_t act(uint32_t rank, const std::vector<Action>& row, Stop& stop) {
    const Action action = row[stop.at];
    if (is_compute(action.op)) {
      return compute(rank, row, stop);
    }
    if (direct_) {
      return 1;
    }
    switch (action.op) {
      case Op::kSendForward:
      case Op::kSendBackward:
        return send(rank, action, stop) ? 1 : 0;
      case Op::kRecvForward:
      case Op::kRecvBackward:
        receive(rank, action);
        return 1;
      case Op::kTieReduce:
        return meet(rank, action.microbatch, action, stop) ? 1 : 0;
      case Op::kOptimizer:
        if (clocks_.optimizer_waits()) {
          return meet(rank, members_.size() - 1, action, stop) ? 1 : 0;
        }
        [[fallthrough]];
      default:
        clocks_.other(rank, action);
        return 1;
    }
  }

  size_t compute(uint32_t rank, const std::vector<Action>& row, Stop& stop) {
    const Action action = row[stop.at];
    if ((action.flags & kPaired) != 0 && stop.at + 1 < row.size() &&
        clocks_.fuses(action)) {
      const Action second = row[stop.at + 1];
      if (!arrived(action, stop) || !arrived(second, stop)) {
        return 0;
      }
      need(rank, action);
      need(rank, second);
      clocks_.pair(rank, action, second);
      hand_on(action);
      hand_on(second);
      return 2;
    }
    if (!arrived(action, stop)) {
      return 0;
    }
    need(rank, action);
    clocks_.compute(rank, action);
    hand_on(action);
    return 1;
  }

  void hand_on(Action action) {
    if (!direct_ || action.op == Op::kBackwardWeight) {
      return;
    }
    const bool backward = action.op != Op::kForward;
    for (const uint32_t edge : program_.makes(backward, action.stage)) {
      const size_t slot = program_.slot(edge, action.microbatch);
      here_[slot] = true;
      wake(program_.edges()[edge].to, Wait::kMessage, slot);
    }
  }

  // Edges whose values an action needs from other ranks.
  EdgeList needs(Action action) const {
    if (action.op == Op::kBackwardWeight || !is_compute(action.op)) {
      return {};
    }
    return program_.needs(action.op != Op::kForward, action.stage);
  }

  bool arrived(Action action, Stop& stop) const {
    for (const uint32_t edge : needs(action)) {
      const size_t slot = program_.slot(edge, action.microbatch);
      if (!here_[slot]) {
        stop.wait = Wait::kMessage;
        stop.what = slot;
        return false;
      }
    }
    return true;
  }

  void need(uint32_t rank, Action action) {
    for (const uint32_t edge : needs(action)) {
      clocks_.need(rank, program_.slot(edge, action.microbatch));
    }
  }

  // Whether the RECV with this number is posted on the channel, or counts from
  // before the first.
  bool posted(uint32_t channel, int64_t number) const {
    return number < received_[channel];
  }

  bool send(uint32_t rank, Action action, Stop& stop) {
    const uint32_t index = program_.edge_of(action);
    const Edge& edge = program_.edges()[index];
    const bool rendezvous = links_.links == Links::kRendezvous;
    if (!stop.begun) {
      const int64_t number = sent_[edge.channel] - links_.max_pending;
      if (rendezvous && !posted(edge.channel, number)) {
        stop.wait = Wait::kSlot;
        stop.what = index;
        return false;
      }
      ++sent_[edge.channel];
      const size_t slot = program_.slot(index, action.microbatch);
      here_[slot] = true;
      clocks_.send(rank, action, index, slot, rendezvous && number >= 0);
      wake(edge.to, Wait::kMessage, slot);
    }
    if (links_.links == Links::kBlocking) {
      stop.begun = true;
      if (!posted(edge.channel, sent_[edge.channel] - 1)) {
        stop.wait = Wait::kSlot;
        stop.what = index;
        return false;
      }
      clocks_.matched(rank, edge.channel);
    }
    clocks_.done(rank);
    return true;
  }

  void receive(uint32_t rank, Action action) {
    const uint32_t index = program_.edge_of(action);
    const Edge& edge = program_.edges()[index];
    ++received_[edge.channel];
    clocks_.post(rank, edge.channel, links_.links != Links::kPosted);
    clocks_.done(rank);
    Stop& sender = stops_[edge.from];
    if (sender.wait == Wait::kSlot &&
        program_.edges()[sender.what].channel == edge.channel) {
      resume(edge.from);
    }
  }

  bool meet(uint32_t rank, size_t collective, Action action, Stop& stop) {
    const std::vector<uint32_t>& members = members_[collective];
    if (!stop.begun) {
      stop.begun = true;
      clocks_.come(rank, collective);
      if (++came_[collective] == members.size()) {
        for (const uint32_t member : members) {
          wake(member, Wait::kMembers, collective);
        }
      }
    }
    if (came_[collective] < members.size()) {
      stop.wait = Wait::kMembers;
      stop.what = collective;
      return false;
    }
    clocks_.meet(rank, collective, action);
    return true;
  }

  void wake(uint32_t rank, Wait wait, size_t what) {
    if (stops_[rank].wait == wait && stops_[rank].what == what) {
      resume(rank);
    }
  }

  void resume(uint32_t rank) {
    stops_[rank].wait = Wait::kNothing;
    runnable_.push_back(rank);
  }

  const Program& program_;
  const std::vector<std::vector<Action>>& rows_;
  const LinkModel links_;
  Clocks& clocks_;
  const bool direct_;
  std::vector<Stop> stops_;
  // Messages that were sent.
  std::vector<uint8_t> here_;
  // Numbers of SENDs and RECVs by channel.
  std::vector<int64_t> sent_;
  std::vector<int64_t> received_;
  std::vector<std::vector<uint32_t>> members_;
  std::vector<size_t> came_;
  std::vector<uint32_t> runnable_;
};

} // namespace torch_sm3::pipeline
