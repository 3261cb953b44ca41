// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/costs.h>
#include <torch_sm3/pipeline/schedule.h>

#include <algorithm>
#include <set>
#include <vector>

namespace torch_sm3::pipeline::testing {

/// Tries every interleaving of a small lowered schedule, by the rules of the
/// specification and nothing of the verifier's.
class Interleavings {
 public:
  Interleavings(const Schedule& schedule, LinkModel links)
      : schedule_(schedule), links_(links) {}

  /// Whether some order of events leaves a rank that cannot go on.
  bool deadlock() const {
    // Twice the index of each rank's next action, plus one while it stands at a
    // SEND that has left.
    std::vector<size_t> start(schedule_.ranks, 0);
    std::set<std::vector<size_t>> seen{start};
    std::vector<std::vector<size_t>> work{start};
    bool found = false;
    while (!work.empty() && !found) {
      const std::vector<size_t> state = work.back();
      work.pop_back();
      bool moved = false;
      bool ended = true;
      for (uint32_t rank = 0; rank < schedule_.ranks; ++rank) {
        if (state[rank] / 2 == schedule_.rows[rank].size()) {
          continue;
        }
        ended = false;
        if (const size_t steps = can_go(state, rank)) {
          std::vector<size_t> next = state;
          next[rank] += steps;
          moved = true;
          if (seen.insert(next).second) {
            work.push_back(next);
          }
        }
      }
      found = !moved && !ended;
    }
    return found;
  }

 private:
  using State = std::vector<size_t>;

  uint32_t rank_of(uint32_t stage) const {
    return schedule_.placement[stage];
  }

  // Stage at the other end of a message.
  uint32_t other_end(Action a) const {
    if (a.flags > 0) {
      const Route route = schedule_.routes[a.flags - 1u];
      return a.stage == route.source ? route.target : route.source;
    }
    const bool up = a.op == Op::kSendForward || a.op == Op::kRecvBackward;
    return up ? a.stage + 1u : a.stage - 1u;
  }

  static Op mirror(Op op) {
    switch (op) {
      case Op::kSendForward:
        return Op::kRecvForward;
      case Op::kSendBackward:
        return Op::kRecvBackward;
      case Op::kRecvForward:
        return Op::kSendForward;
      default:
        return Op::kSendBackward;
    }
  }

  static bool sends(Op op) {
    return op == Op::kSendForward || op == Op::kSendBackward;
  }

  bool done(const State& state, uint32_t rank, Action action) const {
    const auto& row = schedule_.rows[rank];
    // A SEND has left as soon as it was begun.
    const size_t count =
        sends(action.op) ? (state[rank] + 1) / 2 : state[rank] / 2;
    return std::any_of(row.begin(), row.begin() + count, [&](Action a) {
      a.flags = is_compute(a.op) ? 0 : a.flags;
      return a == action;
    });
  }

  // Messages of one kind that a rank has handled in its first actions.
  size_t
  handled(uint32_t rank, size_t actions, Op op, uint8_t flags, uint32_t peer)
      const {
    const auto& row = schedule_.rows[rank];
    return std::count_if(row.begin(), row.begin() + actions, [&](Action a) {
      return a.op == op && a.flags == flags && rank_of(other_end(a)) == peer;
    });
  }

  // What a stage gets from another, directly or as a message.
  bool
  has(const State& state,
      uint32_t rank,
      Op made,
      uint32_t source,
      Action use,
      uint8_t flags) const {
    const auto produced = [&](Op op) {
      return done(
          state,
          rank_of(source),
          {op, 0, static_cast<uint16_t>(source), use.microbatch});
    };
    if (rank_of(source) == rank) {
      return produced(made) ||
             (made == Op::kBackward && produced(Op::kBackwardInput));
    }
    const bool forward = made == Op::kForward;
    const Action recv{
        forward ? Op::kRecvForward : Op::kRecvBackward,
        flags,
        use.stage,
        use.microbatch};
    const Action send{
        mirror(recv.op), flags, static_cast<uint16_t>(source), use.microbatch};
    return done(state, rank, recv) && done(state, rank_of(source), send);
  }

  bool ready(const State& state, uint32_t rank, Action a) const {
    if (a.op == Op::kBackwardWeight) {
      return done(state, rank, {Op::kBackwardInput, 0, a.stage, a.microbatch});
    }
    const bool forward = a.op == Op::kForward;
    if (!forward &&
        !done(state, rank, {Op::kForward, 0, a.stage, a.microbatch})) {
      return false;
    }
    const Op made = forward ? Op::kForward : Op::kBackward;
    const bool outer =
        forward ? a.stage == 0 : a.stage + 1u == schedule_.stages;
    const uint32_t neighbour = forward ? a.stage - 1u : a.stage + 1u;
    if (!outer && !has(state, rank, made, neighbour, a, 0)) {
      return false;
    }
    for (size_t i = 0; i < schedule_.routes.size(); ++i) {
      const Route route = schedule_.routes[i];
      const uint32_t source = forward ? route.source : route.target;
      if ((forward ? route.target : route.source) == a.stage &&
          !has(state, rank, made, source, a, static_cast<uint8_t>(i + 1))) {
        return false;
      }
    }
    return true;
  }

  // Half steps that a rank can take.
  size_t can_go(const State& state, uint32_t rank) const {
    const size_t at = state[rank] / 2;
    const auto& row = schedule_.rows[rank];
    const Action a = row[at];
    if (is_compute(a.op)) {
      const bool pair = (a.flags & kPaired) != 0;
      const bool go =
          ready(state, rank, a) && (!pair || ready(state, rank, row[at + 1]));
      return go ? (pair ? 4 : 2) : 0;
    }
    if (sends(a.op)) {
      return can_send(state, rank, at, a);
    }
    if (a.op == Op::kTieReduce) {
      return met(state, a) ? 2 : 0;
    }
    return 2;
  }

  size_t
  can_send(const State& state, uint32_t rank, size_t at, Action a) const {
    const uint32_t peer = rank_of(other_end(a));
    const size_t before = handled(rank, at, a.op, a.flags, peer);
    const size_t matched =
        handled(peer, state[peer] / 2, mirror(a.op), a.flags, rank);
    switch (links_.links) {
      case Links::kPosted:
        return 2;
      case Links::kRendezvous:
        return before < matched + static_cast<size_t>(links_.max_pending) ? 2
                                                                          : 0;
      default:
        return state[rank] % 2 == 0 || matched > before ? 1 : 0;
    }
  }

  // Whether all members are at a collective or beyond.
  bool met(const State& state, Action a) const {
    const auto& members = schedule_.ties[a.microbatch];
    return std::all_of(members.begin(), members.end(), [&](uint16_t member) {
      const uint32_t rank = rank_of(member);
      const auto& row = schedule_.rows[rank];
      const size_t next = std::min(state[rank] / 2 + 1, row.size());
      return std::any_of(row.begin(), row.begin() + next, [&](Action b) {
        return b.op == a.op && b.microbatch == a.microbatch;
      });
    });
  }

  const Schedule& schedule_;
  const LinkModel links_;
};

} // namespace torch_sm3::pipeline::testing
