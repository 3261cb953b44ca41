// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Coefficients of one layer from its Gram matrix, once for host and device.
///
/// Every result of Adasum is `sum_i c_i g_i` where `c` depends on the inner
/// products of the leaves alone.

#include "adasum_nodes_math.h"
#include "adasum_tree_math.h"
#include "scalar_math.h"

#include <torch_sm3/adasum_mode.h>

#include <cmath>
#include <cstdint>

namespace torch_sm3::distributed {

/// What holds for all layers; a kernel takes it by value.
struct LayerRule {
  int64_t p; ///< number of leaves
  Mode mode;
  double scale; ///< factor of every coefficient
  /// Weights of the leaves, 0: absent; null: all 1.
  const double* weights;
  /// Ranks per node; they sum to p. Null: no nodes.
  const int64_t* nodes;
  int64_t node_count;
  Inner inner;
};

/// What is known of one layer.
struct LayerInput {
  /// p x p inner products of the leaves 2^-shift_i g_i, row by row.
  const double* gram;
  /// INT32_MIN counts as 0; null: all 0.
  const int32_t* shifts;
  /// Leaves that are nodes of an earlier stage (their weights replace those of
  /// the rule); null: gradients.
  const NodeState* states;
  /// The layer gets the mean, whatever the rule says.
  bool excluded;
};

/// What is computed for one layer.
struct LayerOutput {
  double* c;        ///< p coefficients of the leaves 2^-shift_i g_i
  double* report;   ///< kappa and the number of cancelled nodes
  NodeState* state; ///< the root as a leaf of the next stage
};

/// Float64 of scratch per layer; `nodes`: number of nodes, or 0.
TORCH_SM3_INLINE int64_t layer_scratch(int64_t p, int64_t nodes) {
  return p + nodes * (nodes + 3);
}

/// Integers of scratch per layer.
TORCH_SM3_INLINE int64_t layer_integers(int64_t p, int64_t nodes) {
  return p + 2 * nodes;
}

namespace detail {

TORCH_SM3_INLINE NodeState state_of(const Layer& layer, const Node& root) {
  const bool present = root.weight > 0.0;
  return {
      root.weight,
      present ? ldexp(root.spread, root.exponent) : 0.0,
      layer.active};
}

TORCH_SM3_INLINE Means
means_in(double* numbers, int32_t* integers, int64_t count) {
  double* lists = numbers + count * count;
  return {
      numbers,
      lists,
      lists + count,
      lists + 2 * count,
      integers,
      integers + count};
}

/// Coefficients by tree or psum of two leaves or more.
TORCH_SM3_INLINE NodeState
with_projection(const Layer& layer, const LayerRule& rule, const Means& means) {
  const Nodes nodes{rule.nodes, rule.node_count};
  NodeState state{0.0, 0.0, layer.active};
  if (nodes.count > 0 && rule.inner == Inner::mean) {
    node_means(layer, rule.mode, nodes, means);
  } else if (rule.mode == Mode::psum) {
    one_round(layer);
  } else {
    state = state_of(
        layer,
        nodes.count > 0 ? node_trees(layer, nodes) : tree(layer, 0, layer.p));
  }
  return state;
}

} // namespace detail

/// Writes the coefficients of one layer.
///
/// A layer with a NaN or an infinity in its Gram matrix gets NaN by the rules
/// that project.
///
/// \param numbers  layer_scratch(p, node_count) float64
/// \param integers layer_integers(p, node_count)
/// \param output   `state` is that of `tree` without the mean of nodes; its
///                 weight is 0 for all other rules
TORCH_SM3_INLINE void adasum_layer_coefficients(
    const LayerRule& rule,
    const LayerInput& input,
    double* numbers,
    int32_t* integers,
    const LayerOutput& output) {
  const int64_t p = rule.p;
  const Mode mode = input.excluded ? Mode::mean : rule.mode;
  const bool projects = mode == Mode::tree || mode == Mode::psum;
  const bool finite = detail::all_finite(input.gram, p * p);
  detail::Report report{1.0, 0.0};
  detail::Layer layer{
      input.gram,
      p,
      rule.weights,
      input.shifts,
      input.states,
      integers,
      numbers,
      output.c,
      0.0,
      &report};
  layer.active = finite ? detail::count_active(layer) : 0.0;
  NodeState state{0.0, 0.0, layer.active};
  if (projects && finite) {
    detail::find_exponents(layer);
    state = detail::with_projection(
        layer,
        rule,
        detail::means_in(numbers + p, integers + p, rule.node_count));
  } else if (projects) {
    report.kappa = NAN;
    for (int64_t i = 0; i < p; ++i) {
      output.c[i] = NAN;
    }
  } else {
    const bool means = rule.inner == Inner::mean;
    detail::without_projection(
        layer, mode, {rule.nodes, means ? rule.node_count : 0});
  }
  if (p == 1) {
    // One rank keeps what it has, NaN included.
    output.c[0] = ldexp(1.0, detail::shift_of(layer, 0));
  }
  for (int64_t i = 0; i < p; ++i) {
    output.c[i] *= rule.scale;
  }
  output.report[0] = report.kappa;
  output.report[1] = report.cancelled;
  *output.state = state;
}

} // namespace torch_sm3::distributed
