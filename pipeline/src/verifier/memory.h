// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/costs.h>
#include <verifier/fifo.h>
#include <verifier/program.h>

#include <algorithm>
#include <unordered_set>
#include <vector>

/// \file
/// Bytes in use on a rank, action by action: what the verifier checks, the
/// simulator reports and the runtime counts. They follow from the order of the
/// row alone; no clock changes them.
///
/// An action first takes what it makes, then gives back what it has used up:
///   - F makes the activation and each value that other stages need; B and I
///     make the gradients of the inputs. What other stages made is given back
///     by the action that uses it.
///   - The activation is given back by B, or in two parts by I and W; by F
///     itself if there are no backwards. The second part is the larger one
///     where I keeps more than it lets go of.
///   - What an activation shares with the stage's output is in use once: it is
///     given back with the one that goes last.
///   - A RECV takes its message.
///   - What was sent is given back when SEND number k + max_pending of its
///     channel goes out, because that SEND waits for it; with blocking links by
///     its own SEND; otherwise at the end of the row.
///   - A pair that is one call is one action.

namespace torch_sm3::pipeline {

class Memory {
 public:
  /// \param program a schedule whose counts are right; must outlive this
  /// \param costs   bytes
  /// \param links   when what was sent is given back
  Memory(const Program& program, const Costs& costs, LinkModel links);

  /// Most bytes in use, and the action at which they are first.
  struct Peak {
    double bytes = 0;
    size_t at = 0;
  };

  /// Tells whether any cost is not zero.
  bool counts() const {
    return counts_;
  }

  /// Finds the peak of a rank.
  ///
  /// \param rank the rank
  Peak peak(uint32_t rank);

  /// Returns the bytes in use after each action of a rank; of a pair that is
  /// one call, for both halves those after it.
  ///
  /// \param rank the rank
  std::vector<double> after(uint32_t rank);

 private:
  struct Change {
    double takes = 0;
    double gives = 0;
    double works = 0; ///< in use only meanwhile
  };

  void fill_stage(uint32_t stage, bool training);
  void fill_edge(uint32_t index, const Edge& edge);
  Change& of(Op op, uint32_t stage);
  Change change(Action action);
  Change compute(Action action);
  Change send(uint32_t index, uint32_t microbatch);
  double leave(size_t slot);

  // Calls visit(index, actions, bytes meanwhile, bytes after) for each action.
  template <class Visit>
  void walk(uint32_t rank, const Visit& visit) {
    for (const uint32_t channel : channels_[rank]) {
      pending_[channel].clear();
    }
    unsettled_.clear();
    const std::vector<Action>& row = program_.schedule().rows[rank];
    double live = resident_[rank];
    for (size_t at = 0; at < row.size();) {
      Change all = change(row[at]);
      size_t actions = 1;
      if ((row[at].flags & kPaired) != 0 && is_compute(row[at].op) &&
          at + 1 < row.size() && costs_.of(row[at].stage).pair) {
        const Change second = change(row[at + 1]);
        all.takes += second.takes;
        all.gives += second.gives;
        all.works += second.works;
        actions = 2;
      }
      const double meanwhile = live + all.takes + all.works;
      live += all.takes - all.gives;
      visit(at, actions, meanwhile, live);
      at += actions;
    }
  }

  const Program& program_;
  const Costs& costs_;
  const LinkModel links_;
  bool counts_ = false;
  // By operation, from F to W, and stage.
  std::vector<Change> changes_;
  // Of each edge's values, and what of them an activation holds as well.
  std::vector<double> sizes_;
  std::vector<double> shared_;
  std::vector<double> resident_;
  // Slots of what was sent and counts yet, by channel; channels by sender.
  std::vector<Fifo> pending_;
  // Slots of those of them that share bytes with an activation in use.
  std::unordered_set<size_t> unsettled_;
  std::vector<std::vector<uint32_t>> channels_;
};

} // namespace torch_sm3::pipeline
