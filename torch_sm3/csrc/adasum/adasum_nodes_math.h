// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Coefficients of one layer by the rules that are no plain tree: one round of
/// projections, plain sums, and nodes of several ranks.

#include "adasum_tree_math.h"

#include <torch_sm3/adasum_mode.h>

namespace torch_sm3::distributed::detail {

/// Runs of consecutive ranks.
struct Nodes {
  const int64_t* sizes; // they sum to p
  int64_t count;
};

/// Trax's one-round form: projections on the leaves themselves.
TORCH_SM3_INLINE void one_round(const Layer& layer) {
  double total = 0.0, norms = 0.0;
  int unit = INT32_MIN;
  for (int64_t i = 0; i < layer.p; ++i) {
    if (is_active(layer, i)) {
      const int exponent = layer.exponents[i] + shift_of(layer, i);
      unit = exponent > unit ? exponent : unit;
      total += weight_of(layer, i);
    }
  }
  for (int64_t i = 0; i < layer.p; ++i) {
    layer.c[i] = 0.0;
    if (is_active(layer, i)) {
      const int shift = shift_of(layer, i);
      double others = 0.0;
      for (int64_t j = 0; j < layer.p; ++j) {
        if (j != i && is_active(layer, j)) {
          others += ldexp(
              scaled(layer, i, j),
              layer.exponents[j] + shift_of(layer, j) - layer.exponents[i]);
        }
      }
      const double part = others / scaled(layer, i, i);
      layer.c[i] = ldexp(1.0, shift) - weight_of(layer, i) / total * part;
      norms += ldexp(spread_of(layer, i), layer.exponents[i] + shift - unit);
    }
  }
  for (int64_t i = 0; i < layer.p; ++i) {
    if (is_active(layer, i)) {
      const double own = spread_of(layer, i);
      const int distance = unit - layer.exponents[i] - shift_of(layer, i);
      const double kappa = 1.0 + ldexp(norms / own, distance);
      Report* report = layer.report;
      report->kappa = kappa > report->kappa ? kappa : report->kappa;
    }
  }
}

/// The mean of all ranks, those of zero leaves too, or the sum of the leaves or
/// of their nodes' means.
TORCH_SM3_INLINE void
without_projection(const Layer& layer, Mode mode, const Nodes& nodes) {
  const bool sums = mode == Mode::sum;
  const int64_t runs = !sums ? 1 : nodes.count > 0 ? nodes.count : layer.p;
  int64_t last = 0;
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t first = last;
    last += !sums ? layer.p : nodes.count > 0 ? nodes.sizes[run] : 1;
    double total = 0.0;
    for (int64_t i = first; i < last; ++i) {
      total += weight_of(layer, i);
    }
    for (int64_t i = first; i < last; ++i) {
      const bool alone = sums && nodes.count == 0;
      const double part = alone          ? 1.0
                          : total == 0.0 ? 0.0
                                         : weight_of(layer, i) / total;
      layer.c[i] = ldexp(part, shift_of(layer, i));
    }
  }
}

/// Scratch of `node_means`: the means as leaves of a layer of their own.
struct Means {
  double* gram;       // n x n
  double* weights;    // n
  double* a;          // n
  double* c;          // n
  int32_t* shifts;    // n
  int32_t* exponents; // n
};

/// The mean of the ranks first..last-1 as a node whose `a` is in place.
TORCH_SM3_INLINE Node mean_of(const Layer& layer, int64_t first, int64_t last) {
  Node node{first, last, INT32_MIN, 0.0, 0.0, 0.0};
  for (int64_t i = first; i < last; ++i) {
    const int exponent = layer.exponents[i] + shift_of(layer, i);
    node.weight += weight_of(layer, i);
    node.exponent = is_active(layer, i) && exponent > node.exponent
                        ? exponent
                        : node.exponent;
  }
  for (int64_t i = first; i < last; ++i) {
    layer.a[i] = 0.0;
    if (is_active(layer, i)) {
      const int exponent = layer.exponents[i] + shift_of(layer, i);
      layer.a[i] =
          ldexp(weight_of(layer, i) / node.weight, exponent - node.exponent);
      node.spread += layer.a[i] * spread_of(layer, i);
    }
  }
  node.square = inner(layer, node, node);
  return node;
}

/// A node as seen by the Gram matrix of the means; `a` is in place.
TORCH_SM3_INLINE Node run_of(int64_t first, int64_t last) {
  return Node{first, last, 0, 0.0, 0.0, 0.0};
}

/// Writes the Gram matrix of the means of all nodes, their weights and shifts.
///
/// Without the guard leaves (a, b, -a-b) in one node would give a negative
/// square or coefficients of 1e13.
TORCH_SM3_INLINE void
find_means(const Layer& layer, const Nodes& nodes, const Means& means) {
  int64_t last = 0;
  for (int64_t k = 0; k < nodes.count; ++k) {
    const int64_t first = last;
    last += nodes.sizes[k];
    const Node node = mean_of(layer, first, last);
    const bool present =
        node.spread > 0.0 &&
        is_resolved(node.square, node.spread, layer.active, layer.report);
    means.weights[k] = present ? node.weight : 0.0;
    means.shifts[k] = present ? node.exponent : 0;
    int64_t end = 0;
    for (int64_t j = 0; j <= k; ++j) {
      const int64_t begin = end;
      end += nodes.sizes[j];
      const double dot = inner(layer, run_of(begin, end), run_of(first, last));
      means.gram[j * nodes.count + k] = dot;
      means.gram[k * nodes.count + j] = dot;
    }
  }
}

/// Combines the means of the nodes by `mode`, tree or psum.
TORCH_SM3_INLINE void node_means(
    const Layer& layer,
    Mode mode,
    const Nodes& nodes,
    const Means& means) {
  find_means(layer, nodes, means);
  Layer outer{
      means.gram,
      nodes.count,
      means.weights,
      means.shifts,
      nullptr,
      means.exponents,
      means.a,
      means.c,
      0.0,
      layer.report};
  outer.active = count_active(outer);
  find_exponents(outer);
  if (mode == Mode::psum) {
    one_round(outer);
  } else {
    tree(outer, 0, outer.p);
  }
  int64_t last = 0;
  for (int64_t k = 0; k < nodes.count; ++k) {
    const int64_t first = last;
    last += nodes.sizes[k];
    double total = 0.0;
    for (int64_t i = first; i < last; ++i) {
      total += weight_of(layer, i);
    }
    for (int64_t i = first; i < last; ++i) {
      const double part =
          means.c[k] == 0.0 ? 0.0 : means.c[k] * (weight_of(layer, i) / total);
      layer.c[i] = ldexp(part, shift_of(layer, i) - means.shifts[k]);
    }
  }
}

/// A tree inside each node, then a tree over the nodes with their weights.
TORCH_SM3_INLINE Node node_trees(const Layer& layer, const Nodes& nodes) {
  Open open;
  open.depth = 0;
  int64_t last = 0;
  for (int64_t k = 0; k < nodes.count; ++k) {
    const int64_t first = last;
    last += nodes.sizes[k];
    push(layer, &open, tree(layer, first, last));
  }
  return close(layer, &open);
}

} // namespace torch_sm3::distributed::detail
