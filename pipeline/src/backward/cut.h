// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Cuts the graph of one microbatch into what `input` and what `weight` runs.

#include <backward/nodes.h>

#include <cstddef>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch_sm3::pipeline {

/// What waits for `weight`: where it starts, and with which gradients.
struct Owed {
  edge_list edges;
  variable_list gradients;
  bool empty() const {
    return edges.empty();
  }
};

/// A cut through the graph behind some edges.
///
/// The *path* is every node from which the stage's inputs can be reached. What
/// hangs on it leads to weights only. Where an edge leaves the path:
/// - from a node that runs in parts, the edge waits;
/// - from any other node it is followed in `input`, up to a node that waits
///   anyhow because another way leads there from a node that runs in parts, or
///   up to an accumulator. The gradient is held there. What custom Functions
///   and checkpointed layers send reaches an accumulator in `input`, unless
///   something else waits there.
class Cut {
 public:
  /// \param roots     edges from which the backward starts
  /// \param gradients theirs
  /// \param entry     the stage's inputs, null if none requires grad
  Cut(edge_list roots, variable_list gradients, const Node* entry);

  /// Whether anything waits.
  bool splits() const;

  /// Edits the graph, runs `input` from the roots and restores the graph.
  Owed run();

 private:
  // kEarly and kLate nodes lead to weights only; late ones wait for `weight`.
  enum class Role { kWhole, kParts, kEarly, kLate };
  struct Place {
    Node* node;
    bool path = false;
    Role role = Role::kEarly;
    bool holds = false; // what it sends to accumulators in `input`
    OwnerOf<Partial> partial = {};
  };
  struct Edited {
    NodePtr node;
    edge_list edges;
    OwnerOf<Held> held;
  };

  Place& at(const Edge& edge) {
    return places_[index_.at(edge.function.get())];
  }
  const Place& at(const Edge& edge) const {
    return places_[index_.at(edge.function.get())];
  }
  void visit(const NodePtr& root);
  void mark_path(const std::function<bool(const Node&)>& ends);
  bool any_root_on_path() const;
  void assign_roles();
  void assign(Place& place);
  void divide(Place& place);
  void redirect(Place& place);
  void redirect(edge_list& edges);
  void restore();
  Owed collect();

  edge_list roots_;
  variable_list gradients_;
  std::vector<Place> places_; // what a node leads to stands before it
  std::unordered_map<const Node*, size_t> index_;
  std::vector<Edited> edited_;
  bool reaches_entry_ = false;
};

/// Runs the engine in its plain mode.
///
/// \param roots     edges from which it starts
/// \param gradients theirs
void run_engine(const edge_list& roots, const variable_list& gradients);

} // namespace torch_sm3::pipeline
