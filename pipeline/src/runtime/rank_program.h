// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/channel.h>
#include <torch_sm3/pipeline/schedule.h>

#include <cstdint>
#include <map>
#include <vector>

namespace torch_sm3::pipeline {

// One way between two stages, as one of their ranks sees it.
struct Way {
  Channel channel = Channel::kActivation;
  uint16_t source = 0; // stage that makes what travels
  uint16_t target = 0;
  int64_t peer = 0; // rank of the other stage
  bool local = false;
};

// All ways of a stage: to or from its neighbour first, then its routes in
// ascending order. Gradients go the ways of the values back, in their order.
struct StageWays {
  std::vector<Way> values_in;
  std::vector<Way> values_out;
  std::vector<Way> gradients_in;
  std::vector<Way> gradients_out;
};

// What one rank does: its row of a lowered schedule, and the ways of its
// stages.
class RankProgram {
 public:
  RankProgram(Schedule lowered, uint32_t rank);

  const Schedule& schedule() const {
    return schedule_;
  }
  uint32_t rank() const {
    return rank_;
  }
  const std::vector<Action>& row() const {
    return schedule_.rows[rank_];
  }
  const StageWays& ways(uint16_t stage) const {
    return ways_.at(stage);
  }
  bool is_last(uint16_t stage) const {
    return stage + 1u == schedule_.stages;
  }
  // The way of a message of this rank.
  const Way& way(Action action) const;
  // Stages of this rank, in ascending order.
  std::vector<uint16_t> stages() const;
  // Whether any action of any rank makes gradients.
  bool trains() const;

 private:
  Way make_way(Channel channel, uint16_t source, uint16_t target) const;
  void connect(uint16_t source, uint16_t target, Channel there, Channel back);

  Schedule schedule_;
  uint32_t rank_;
  std::map<uint16_t, StageWays> ways_;
};

// The schedule that runs the same stages forward only, chunk after chunk.
Schedule forward_of(const Schedule& schedule, uint32_t microbatches);

} // namespace torch_sm3::pipeline
