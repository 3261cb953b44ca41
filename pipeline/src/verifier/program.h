// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/schedule.h>

#include <cstddef>
#include <vector>

/// \file
/// Who makes and who needs what in a schedule: the numbering that verifier,
/// simulator and memory count share.

namespace torch_sm3::pipeline {

/// What one stage makes for another, once per microbatch: an output, or the
/// gradient of an input.
struct Edge {
  bool exists = false;
  bool backward = false;
  bool crosses = false; ///< between two ranks
  uint8_t flags = 0;    ///< of its messages
  uint16_t source = 0;
  uint16_t target = 0;
  uint32_t from = 0; ///< rank of the source
  uint32_t to = 0;   ///< rank of the target
  /// Directed link: all edges from one rank to another.
  uint32_t link = 0;
  /// Edges of a link with one direction and route: their messages are matched
  /// by order.
  uint32_t channel = 0;
};

/// Numbers of a few edges.
struct EdgeList {
  const uint32_t* first = nullptr;
  const uint32_t* last = nullptr;

  const uint32_t* begin() const {
    return first;
  }
  const uint32_t* end() const {
    return last;
  }
};

class Program {
 public:
  /// Numbers the edges of a schedule.
  ///
  /// \param schedule what to number; must outlive this
  explicit Program(const Schedule& schedule);

  const Schedule& schedule() const {
    return schedule_;
  }
  const std::vector<Edge>& edges() const {
    return edges_;
  }
  uint32_t links() const {
    return links_;
  }
  uint32_t channels() const {
    return channels_;
  }

  /// Number of values that stages make for each other.
  size_t slots() const {
    return edges_.size() * schedule_.microbatches;
  }
  size_t slot(uint32_t edge, uint32_t microbatch) const {
    return size_t{edge} * schedule_.microbatches + microbatch;
  }

  /// The edge on which a message travels; it may not exist.
  ///
  /// \param message a SEND or RECV
  uint32_t edge_of(Action message) const {
    const bool backward =
        message.op == Op::kSendBackward || message.op == Op::kRecvBackward;
    const uint32_t stages = schedule_.stages;
    if (message.flags > 0) {
      return 2 * (stages + message.flags - 1u) + (backward ? 1 : 0);
    }
    const uint32_t stage = message.stage;
    switch (message.op) {
      case Op::kSendForward:
        return stage + 1 < stages ? stage + 1 : kNoEdge;
      case Op::kRecvForward:
        return stage;
      case Op::kSendBackward:
        return stage > 0 ? stages + stage - 1 : kNoEdge;
      default:
        return stages + stage;
    }
  }

  /// Edges between ranks whose values a forward or input gradient needs.
  EdgeList needs(bool backward, uint32_t stage) const {
    return list(needs_, backward, stage);
  }

  /// Edges within its rank whose values a forward or input gradient needs.
  EdgeList local_needs(bool backward, uint32_t stage) const {
    return list(local_needs_, backward, stage);
  }

  /// Edges between ranks whose values a forward or input gradient makes.
  EdgeList makes(bool backward, uint32_t stage) const {
    return list(makes_, backward, stage);
  }

  /// The SEND (or RECV) of an edge, for words.
  ///
  /// \param edge       number of the edge
  /// \param microbatch number of the microbatch
  /// \param send       whether the SEND is meant
  Action message(uint32_t edge, uint32_t microbatch, bool send) const;

  /// Edge 0, a forward into stage 0, never exists.
  static constexpr uint32_t kNoEdge = 0;

 private:
  // Edges by stage, one after another, and where each stage's begin.
  struct Lists {
    std::vector<uint32_t> begins;
    std::vector<uint32_t> edges;
  };

  void add(uint32_t index, uint16_t source, uint16_t target, bool backward);
  void number_links();
  Lists lists(bool by_target, bool crossing) const;

  EdgeList list(const Lists& lists, bool backward, uint32_t stage) const {
    const size_t i = (backward ? schedule_.stages : 0) + size_t{stage};
    const uint32_t* all = lists.edges.data();
    return {all + lists.begins[i], all + lists.begins[i + 1]};
  }

  const Schedule& schedule_;
  std::vector<Edge> edges_;
  uint32_t links_ = 0;
  uint32_t channels_ = 0;
  Lists needs_;
  Lists local_needs_;
  Lists makes_;
};

} // namespace torch_sm3::pipeline
