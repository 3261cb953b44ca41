// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Nodes that the backward puts into a stage's graph.

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <c10/util/intrusive_ptr.h>

#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch_sm3::pipeline {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// Owns a node: a shared pointer in some versions of torch, an intrusive one in
/// others.
using NodePtr = decltype(Edge::function);
template <class T>
using OwnerOf = std::conditional_t<
    std::is_same_v<NodePtr, std::shared_ptr<Node>>,
    std::shared_ptr<T>,
    c10::intrusive_ptr<T>>;

template <class T, class... Arguments>
OwnerOf<T> make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<OwnerOf<T>, std::shared_ptr<T>>) {
    return std::make_shared<T>(std::forward<Arguments>(arguments)...);
  } else {
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
  }
}

/// The engine runs nodes of this number before all others.
constexpr uint64_t kAtOnce = std::numeric_limits<uint64_t>::max();

/// Where a stage's graph ends: the gradients of its inputs arrive here.
struct Entry final : Node {
  Entry() : Node(kAtOnce) {}
  std::string name() const override {
    return "PipelineStageInputs";
  }
  variable_list gradients;

 protected:
  variable_list apply(variable_list&& grads) override;
};

/// Stands in the graph for a node that is run in parts: records the gradients
/// that enter, then runs the node for those of its edges that are left.
struct Partial final : Node {
  explicit Partial(NodePtr of);
  std::string name() const override {
    return node->name();
  }
  NodePtr node;
  /// The edges that wait for `weight`, in their places.
  edge_list weights;
  variable_list recorded;
  /// Whether any edge is left for `input`.
  bool runs = false;

 protected:
  variable_list apply(variable_list&& grads) override;
};

/// Takes the gradients that one node sends to weights, and sends them on when
/// it is run again in `weight`, at that node's place in the order.
struct Held final : Node {
  explicit Held(uint64_t place) : Node(kAtOnce), place_(place) {}
  std::string name() const override {
    return "PipelineHeldGradients";
  }
  /// Returns the edge that stands for `target`.
  Edge stand_in(const OwnerOf<Held>& self, Edge target);
  /// Turns from the end of edges into their start.
  void turn();

 protected:
  variable_list apply(variable_list&& grads) override;

 private:
  uint64_t place_;
  edge_list targets_;
  variable_list gradients_;
};

/// Where `weight` starts: gives many edges their gradients, and keeps none.
struct Gate final : Node {
  /// \param edges     where to
  /// \param gradients one for each edge
  /// \param ticket    decides device and stream: on those of the nodes behind,
  ///                  the engine queues all of them before it runs the first
  Gate(edge_list edges, variable_list gradients, const at::Tensor& ticket);
  std::string name() const override {
    return "PipelineWeightGradients";
  }

 protected:
  variable_list apply(variable_list&& grads) override;

 private:
  variable_list gradients_;
};

} // namespace torch_sm3::pipeline
