// SPDX-License-Identifier: Apache-2.0
#include <backward/cut.h>
#include <backward/parts.h>

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/tensor.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

// Where no input of the stage requires grad, the path ends at the lowest nodes
// that read something without grad. The choice is a guess, which decides how
// the work is divided and nothing else.
bool lacks_edge(const Node& node) {
  return !std::ranges::all_of(
      node.next_edges(), [](const Edge& edge) { return edge.is_valid(); });
}

// A product with a weight is a better guess than, say, a weight times 0.1.
bool is_first_layer(const Node& node) {
  return is_embedding(node) || (is_layer(node) && lacks_edge(node));
}

} // namespace

void run_engine(const edge_list& roots, const variable_list& gradients) {
  if (roots.empty()) {
    return;
  }
  // The casts of the forward are in the graph; a backward makes no new ones.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  // No outputs are named, since reentrant checkpoints refuse to run then: what
  // must not run has been taken out of the graph instead.
  torch::autograd::Engine::get_default_engine().execute(
      roots,
      gradients,
      /*keep_graph=*/false,
      /*create_graph=*/false,
      /*accumulate_grad=*/true);
}

Cut::Cut(edge_list roots, variable_list gradients, const Node* entry)
    : roots_(std::move(roots)), gradients_(std::move(gradients)) {
  for (const Edge& root : roots_) {
    visit(root.function);
  }
  mark_path([&](const Node& node) { return &node == entry; });
  reaches_entry_ = any_root_on_path();
  if (!reaches_entry_) {
    mark_path(&is_first_layer);
  }
  if (!any_root_on_path()) {
    mark_path(&lacks_edge);
  }
  assign_roles();
}

// Appends all nodes behind a root, in postorder.
void Cut::visit(const NodePtr& root) {
  constexpr size_t kOpen = SIZE_MAX;
  std::vector<std::pair<Node*, uint32_t>> stack;
  const auto enter = [&](Node* node) {
    if (index_.try_emplace(node, kOpen).second) {
      stack.emplace_back(node, 0);
    }
  };
  enter(root.get());
  while (!stack.empty()) {
    auto& [node, next] = stack.back();
    if (next < node->num_outputs()) {
      const Edge& edge = node->next_edge(next++);
      if (edge.is_valid()) {
        enter(edge.function.get());
      }
    } else {
      index_[node] = places_.size();
      places_.push_back({node});
      stack.pop_back();
    }
  }
}

void Cut::mark_path(const std::function<bool(const Node&)>& ends) {
  for (Place& place : places_) {
    place.path =
        ends(*place.node) ||
        std::ranges::any_of(place.node->next_edges(), [&](const Edge& edge) {
          return edge.is_valid() && at(edge).path;
        });
  }
}

bool Cut::any_root_on_path() const {
  return std::ranges::any_of(
      roots_, [&](const Edge& root) { return at(root).path; });
}

void Cut::assign_roles() {
  for (const Edge& root : roots_) {
    if (!at(root).path) {
      at(root).role = Role::kLate;
    }
  }
  // From the outputs down: a node's role is known before what it leads to.
  for (auto place = places_.rbegin(); place != places_.rend(); ++place) {
    assign(*place);
  }
}

void Cut::assign(Place& place) {
  if (place.path) {
    const bool owns = std::ranges::any_of(
        place.node->next_edges(),
        [&](const Edge& edge) { return edge.is_valid() && !at(edge).path; });
    // A hook that sees a node's outputs must see them all.
    const bool parts =
        owns && place.node->post_hooks().empty() && runs_in_parts(*place.node);
    place.role = parts ? Role::kParts : Role::kWhole;
    // The gradients of a whole layer's weights may be large: they do not wait.
    place.holds = is_built_in(*place.node) && !is_layer(*place.node);
  }
  const bool waits = place.role == Role::kParts || place.role == Role::kLate;
  for (const Edge& edge : place.node->next_edges()) {
    if (!edge.is_valid() || at(edge).path) {
      continue;
    }
    Place& target = at(edge);
    const bool accumulator = target.node->num_outputs() == 0;
    if (waits || (place.holds && accumulator)) {
      target.role = Role::kLate;
    }
    target.holds |= place.holds;
  }
}

bool Cut::splits() const {
  const auto in_parts = [](const Place& place) {
    return place.role == Role::kParts;
  };
  const auto waits = [&](const Edge& root) {
    return at(root).role == Role::kLate;
  };
  return std::ranges::any_of(places_, in_parts) ||
         std::ranges::any_of(roots_, waits);
}

Owed Cut::run() {
  const auto restored = c10::make_scope_exit([&] { restore(); });
  for (Place& place : places_) {
    if (place.role == Role::kParts) {
      divide(place);
    }
  }
  for (Place& place : places_) {
    if (place.role == Role::kWhole || place.role == Role::kEarly) {
      redirect(place);
    } else if (place.role == Role::kParts) {
      redirect(place.partial->next_edges());
    }
  }
  edge_list early;
  variable_list gradients;
  for (size_t i = 0; i < roots_.size(); ++i) {
    if (at(roots_[i]).role != Role::kLate) {
      early.push_back(roots_[i]);
      gradients.push_back(gradients_[i]);
    }
  }
  redirect(early);
  run_engine(early, gradients);
  return collect();
}

// Takes from a node the edges that wait, and puts a stand-in before it.
void Cut::divide(Place& place) {
  Node& node = *place.node;
  place.partial = make_node<Partial>(node.getptr());
  Partial& partial = *place.partial;
  partial.weights.resize(node.num_outputs());
  for (uint32_t i = 0; i < node.num_outputs(); ++i) {
    Edge& edge = node.next_edges()[i];
    if (edge.is_valid() && !at(edge).path) {
      std::swap(edge, partial.weights[i]);
    }
    partial.runs |= edge.is_valid();
  }
  partial.next_edges() = node.next_edges();
}

void Cut::redirect(edge_list& edges) {
  for (Edge& edge : edges) {
    if (edge.is_valid() && at(edge).partial) {
      edge.function = at(edge).partial;
    }
  }
}

// Lets a node that runs now send to stand-ins, and hold what waits.
void Cut::redirect(Place& place) {
  Node& node = *place.node;
  const auto moves = [&](const Edge& edge) {
    return edge.is_valid() &&
           (at(edge).partial || at(edge).role == Role::kLate);
  };
  if (std::ranges::none_of(node.next_edges(), moves)) {
    return;
  }
  Edited edited{node.getptr(), node.next_edges(), {}};
  for (Edge& edge : node.next_edges()) {
    if (!edge.is_valid()) {
      continue;
    }
    const Place& target = at(edge);
    if (target.partial) {
      edge.function = target.partial;
    } else if (target.role == Role::kLate) {
      if (!edited.held) {
        edited.held = make_node<Held>(node.sequence_nr());
      }
      edge = edited.held->stand_in(edited.held, edge);
    }
  }
  edited_.push_back(std::move(edited));
  // What was done in place on a view: the node of that operation is inside, and
  // torch checks that it has the same edges but for the first.
  if (const auto* slices = dynamic_cast<torch::autograd::CopySlices*>(&node)) {
    edge_list& inner = slices->fn->next_edges();
    edited_.push_back({slices->fn, inner, {}});
    std::copy(
        node.next_edges().begin() + 1,
        node.next_edges().end(),
        inner.begin() + 1);
  }
}

// Nodes that lead to weights only may be shared with other microbatches, such
// as a transposed weight that a module keeps. Those of the path have run: what
// a layer saved leads back to them, and would keep all that is below them
// alive.
void Cut::restore() {
  for (Edited& edited : edited_) {
    edited.node->next_edges() = std::move(edited.edges);
  }
  for (Place& place : places_) {
    if (place.partial) {
      place.node->next_edges() = std::move(place.partial->weights);
    } else if (place.path && reaches_entry_) {
      place.node->next_edges().clear();
    }
  }
}

// The order in which the nodes run is that of the full backward, whatever the
// order here: the engine runs the one that was made last first.
Owed Cut::collect() {
  Owed owed;
  const auto add = [&](Edge edge, at::Tensor gradient) {
    owed.edges.push_back(std::move(edge));
    owed.gradients.push_back(std::move(gradient));
  };
  for (size_t i = 0; i < roots_.size(); ++i) {
    if (at(roots_[i]).role == Role::kLate) {
      add(roots_[i], std::move(gradients_[i]));
    }
  }
  for (const Place& place : places_) {
    if (place.partial) {
      for (uint32_t i = 0; i < place.node->num_inputs(); ++i) {
        add({place.partial->node, i}, std::move(place.partial->recorded[i]));
      }
    }
  }
  for (Edited& edited : edited_) {
    if (edited.held) {
      edited.held->turn();
      add({std::move(edited.held), 0}, {});
    }
  }
  return owed;
}

} // namespace torch_sm3::pipeline
