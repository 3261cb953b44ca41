// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The pair rule and its tree on the Gram matrix of one layer, once for host
/// and device.
///
/// Exponents are split off first, so that leaves whose norms differ by 1e150
/// neither overflow nor underflow.

#include "scalar_math.h"

#include <cmath>
#include <cstdint>

namespace torch_sm3::distributed {

/// A node that an earlier stage has computed and that is a leaf of this one.
struct NodeState {
  double weight; ///< 0: absent
  double spread; ///< S: the norms of the leaves below it, times |coefficient|
  double leaves; ///< active leaves below it
};

namespace detail {

/// Epsilon of the float64 in which the dot products are summed.
inline constexpr double kEpsilon = 0x1p-52;
/// Open nodes of a tree over fewer than 2^31 ranks.
inline constexpr int kMaxDepth = 32;

/// What is told about a layer besides its coefficients.
struct Report {
  double kappa;     // largest S / |node|
  double cancelled; // nodes below the guard
};

/// One layer: what is known of its leaves, and the vectors of all nodes (no
/// leaf belongs to two open nodes).
struct Layer {
  const double* gram; // of the leaves 2^-shift_i g_i
  int64_t p;
  const double* weights;   // or null: all 1
  const int32_t* shifts;   // or null: all 0
  const NodeState* states; // or null: the leaves are gradients
  int32_t* exponents;      // of the norms, shifts left out
  double* a;               // see Node
  double* c;               // coefficients of the leaves 2^-shift_i g_i
  double active;           // p' of the guard
  Report* report;
};

/// The vector 2^exponent * sum_i a_i 2^-(e_i + shift_i) g_i over the leaves
/// first..last-1.
struct Node {
  int64_t first, last;
  int exponent;
  double weight; // 0: absent
  double square; // a^T H a
  double spread; // S in units of 2^exponent
};

TORCH_SM3_INLINE bool all_finite(const double* gram, int64_t count) {
  bool finite = true;
  for (int64_t k = 0; k < count; ++k) {
    // Also false for NaN.
    finite = finite && fabs(gram[k]) <= 0x1.fffffffffffffp+1023;
  }
  return finite;
}

TORCH_SM3_INLINE int shift_of(const Layer& layer, int64_t i) {
  const int32_t shift = layer.shifts == nullptr ? 0 : layer.shifts[i];
  return shift == INT32_MIN ? 0 : shift; // a leaf of zeros has no exponent
}

TORCH_SM3_INLINE double weight_of(const Layer& layer, int64_t i) {
  return layer.states != nullptr    ? layer.states[i].weight
         : layer.weights != nullptr ? layer.weights[i]
                                    : 1.0;
}

/// False for leaves of zeros or zero weight, and for nodes of an earlier stage
/// whose leaves cancelled.
TORCH_SM3_INLINE bool is_active(const Layer& layer, int64_t i) {
  const double square = layer.gram[i * layer.p + i];
  if (layer.states == nullptr) {
    return square > 0.0 && weight_of(layer, i) > 0.0;
  }
  const NodeState& state = layer.states[i];
  const double spread = ldexp(state.spread, -shift_of(layer, i));
  return square > 8.0 * state.leaves * kEpsilon * spread * spread &&
         state.weight > 0.0;
}

/// Number of gradients that are not all zero.
TORCH_SM3_INLINE double count_active(const Layer& layer) {
  double count = 0.0;
  for (int64_t i = 0; i < layer.p; ++i) {
    const double below = layer.states == nullptr ? 1.0 : layer.states[i].leaves;
    count += is_active(layer, i) ? below : 0.0;
  }
  return count;
}

/// Finds the exponents e with sqrt(G_ii) in [2^(e-1), 2^e).
TORCH_SM3_INLINE void find_exponents(const Layer& layer) {
  for (int64_t i = 0; i < layer.p; ++i) {
    int exponent = 0;
    if (is_active(layer, i)) {
      frexp(sqrt(layer.gram[i * layer.p + i]), &exponent);
    }
    layer.exponents[i] = exponent;
  }
}

/// H_ij = G_ij 2^-(e_i + e_j), exactly.
TORCH_SM3_INLINE double scaled(const Layer& layer, int64_t i, int64_t j) {
  return ldexp(
      layer.gram[i * layer.p + j], -(layer.exponents[i] + layer.exponents[j]));
}

/// S of a leaf in units of 2^(e_i + shift_i).
TORCH_SM3_INLINE double spread_of(const Layer& layer, int64_t i) {
  return layer.states == nullptr
             ? sqrt(scaled(layer, i, i))
             : ldexp(
                   layer.states[i].spread,
                   -(layer.exponents[i] + shift_of(layer, i)));
}

/// a^T H b for a over the leaves of `x` and b over those of `y`.
TORCH_SM3_INLINE double
inner(const Layer& layer, const Node& x, const Node& y) {
  double sum = 0.0;
  for (int64_t i = x.first; i < x.last; ++i) {
    double row = 0.0;
    if (layer.a[i] != 0.0) {
      for (int64_t j = y.first; j < y.last; ++j) {
        row += layer.a[j] == 0.0 ? 0.0 : scaled(layer, i, j) * layer.a[j];
      }
    }
    sum += layer.a[i] * row;
  }
  return sum;
}

/// `node` becomes (1 - rho 2^distance) times itself, in units that grow by
/// 2^-growth.
///
/// The coefficients are kept apart from `a`: where norms differ by more than
/// float64 can hold, the small leaf's entry of `a` vanishes and takes no part
/// in the dots, but the leaf stays in the sum.
TORCH_SM3_INLINE void project(
    const Layer& layer,
    const Node& node,
    double rho,
    int distance,
    int growth) {
  const double factor =
      ldexp(1.0, growth) - rho * ldexp(1.0, distance + growth);
  for (int64_t i = node.first; i < node.last; ++i) {
    layer.a[i] *= factor;
    layer.c[i] -= rho == 0.0 ? 0.0 : rho * ldexp(layer.c[i], distance);
  }
}

TORCH_SM3_INLINE void drop(const Layer& layer, Node* node) {
  for (int64_t i = node->first; i < node->last; ++i) {
    layer.a[i] = 0.0;
    layer.c[i] = 0.0;
  }
  node->weight = 0.0;
}

/// False for a node whose leaves cancel below what the sums can resolve.
TORCH_SM3_INLINE bool
is_resolved(double square, double spread, double active, Report* report) {
  if (!(square > 8.0 * active * kEpsilon * spread * spread)) {
    report->cancelled += 1.0;
    return false;
  }
  const double kappa = spread / sqrt(square);
  report->kappa = kappa > report->kappa ? kappa : report->kappa;
  return true;
}

/// Brings max |a_i| sqrt(H_ii) into [1/2, 1), then applies the guard.
TORCH_SM3_INLINE void finish(const Layer& layer, Node* node) {
  double largest = 0.0, spread = 0.0;
  for (int64_t i = node->first; i < node->last; ++i) {
    const double a = fabs(layer.a[i]);
    if (a != 0.0) {
      const double size = a * sqrt(scaled(layer, i, i));
      largest = size > largest ? size : largest;
      spread += a * spread_of(layer, i);
    }
  }
  int shift = 0;
  frexp(largest, &shift);
  const double unit = ldexp(1.0, -shift);
  for (int64_t i = node->first; i < node->last; ++i) {
    layer.a[i] *= unit;
  }
  node->exponent += shift;
  node->spread = spread * unit;
  node->square = inner(layer, *node, *node);
  if (!is_resolved(node->square, node->spread, layer.active, layer.report)) {
    drop(layer, node);
  }
}

/// The pair rule: `x` becomes the combination of `x` and its right neighbour.
TORCH_SM3_INLINE void merge(const Layer& layer, Node* x, const Node& y) {
  if (x->weight == 0.0 || y.weight == 0.0) {
    Node one = x->weight == 0.0 ? y : *x;
    one.first = x->first;
    one.last = y.last;
    *x = one;
    return;
  }
  const double weight = x->weight + y.weight;
  const double dot = inner(layer, *x, y);
  const double rho_x = x->weight / weight * (dot / x->square);
  const double rho_y = y.weight / weight * (dot / y.square);
  const int distance = y.exponent - x->exponent;
  const int larger = distance > 0 ? y.exponent : x->exponent;
  project(layer, *x, rho_x, distance, x->exponent - larger);
  project(layer, y, rho_y, -distance, y.exponent - larger);
  x->last = y.last;
  x->exponent = larger;
  x->weight = weight;
  finish(layer, x);
}

TORCH_SM3_INLINE Node leaf(const Layer& layer, int64_t i) {
  const bool active = is_active(layer, i);
  layer.a[i] = active ? 1.0 : 0.0;
  layer.c[i] = active ? ldexp(1.0, shift_of(layer, i)) : 0.0;
  Node node{i, i + 1, layer.exponents[i] + shift_of(layer, i), 0.0, 0.0, 0.0};
  if (active) {
    node.weight = weight_of(layer, i);
    node.square = scaled(layer, i, i);
    node.spread = spread_of(layer, i);
  }
  return node;
}

/// The nodes of a tree that wait for their right neighbour, each of half the
/// children of the one before it or fewer.
struct Open {
  Node nodes[kMaxDepth];
  int64_t children[kMaxDepth];
  int depth;
};

/// Adds the next child. Runs of 2^k children are merged as soon as they are
/// full, what is left at the end from the right: the split after the largest
/// power of two, without recursion.
TORCH_SM3_INLINE void push(const Layer& layer, Open* open, const Node& child) {
  open->nodes[open->depth] = child;
  open->children[open->depth++] = 1;
  for (int d = open->depth - 1;
       d > 0 && open->children[d - 1] == open->children[d];
       --d) {
    merge(layer, &open->nodes[d - 1], open->nodes[d]);
    open->children[d - 1] *= 2;
    open->depth = d;
  }
}

TORCH_SM3_INLINE Node close(const Layer& layer, Open* open) {
  for (int d = open->depth - 1; d > 0; --d) {
    merge(layer, &open->nodes[d - 1], open->nodes[d]);
  }
  return open->nodes[0];
}

/// The tree over the leaves first..last-1; exponents are found already.
TORCH_SM3_INLINE Node tree(const Layer& layer, int64_t first, int64_t last) {
  Open open;
  open.depth = 0;
  for (int64_t i = first; i < last; ++i) {
    push(layer, &open, leaf(layer, i));
  }
  return close(layer, &open);
}

} // namespace detail

} // namespace torch_sm3::distributed
