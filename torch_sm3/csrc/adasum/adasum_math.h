// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Coefficients of one layer from its Gram matrix, once for host and device.
///
/// Every result of Adasum is `sum_i c_i g_i` where `c` depends on the inner
/// products of the leaves alone. Exponents are split off first, so that leaves
/// whose norms differ by 1e150 neither overflow nor underflow.

#include "scalar_math.h"

#include <torch_sm3/adasum_mode.h>

#include <cmath>
#include <cstdint>

namespace torch_sm3::distributed {

namespace detail {

/// Epsilon of the float64 in which the dot products are summed.
inline constexpr double kEpsilon = 0x1p-52;
/// Open nodes of a tree over fewer than 2^62 ranks.
inline constexpr int kMaxDepth = 64;

/// The vector 2^exponent * sum_i a_i 2^-e_i g_i over the leaves first..last-1.
struct Node {
  int64_t first, last;
  int exponent;
  double weight; // 0: absent
  double square; // a^T H a
};

/// One layer: Gram matrix, exponents of its leaves' norms, vector a of all
/// nodes (no leaf belongs to two open nodes).
struct Layer {
  const double* gram;
  int64_t p;
  int32_t* exponents;
  double* a;
  double active;
};

/// Exponent e with sqrt(square) in [2^(e-1), 2^e).
TORCH_SM3_INLINE int norm_exponent(double square) {
  int exponent;
  frexp(sqrt(square), &exponent);
  return exponent;
}

/// H_ij = G_ij 2^-(e_i + e_j), exactly.
TORCH_SM3_INLINE double scaled(const Layer& layer, int64_t i, int64_t j) {
  return ldexp(
      layer.gram[i * layer.p + j], -(layer.exponents[i] + layer.exponents[j]));
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

TORCH_SM3_INLINE void
multiply(const Layer& layer, const Node& node, double factor) {
  for (int64_t i = node.first; i < node.last; ++i) {
    layer.a[i] *= factor;
  }
}

/// Brings max |a_i| sqrt(H_ii) into [1/2, 1), then drops the node if its
/// leaves cancel below what the sums can resolve.
TORCH_SM3_INLINE void finish(const Layer& layer, Node* node) {
  double largest = 0.0, total = 0.0;
  for (int64_t i = node->first; i < node->last; ++i) {
    const double a = layer.a[i];
    const double size = a == 0.0 ? 0.0 : fabs(a) * sqrt(scaled(layer, i, i));
    largest = size > largest ? size : largest;
    total += size;
  }
  int shift = 0;
  frexp(largest, &shift);
  multiply(layer, *node, ldexp(1.0, -shift));
  node->exponent += shift;
  total = ldexp(total, -shift);
  node->square = inner(layer, *node, *node);
  if (!(node->square > 8.0 * layer.active * kEpsilon * total * total)) {
    multiply(layer, *node, 0.0);
    node->weight = 0.0;
  }
}

/// The pair rule: `x` becomes the combination of `x` and its right neighbour.
TORCH_SM3_INLINE void merge(const Layer& layer, Node* x, const Node& y) {
  Node both = *x;
  both.last = y.last;
  both.weight = x->weight + y.weight;
  if (x->weight == 0.0 || y.weight == 0.0) {
    const Node& one = x->weight == 0.0 ? y : *x;
    both.exponent = one.exponent;
    both.square = one.square;
    *x = both;
    return;
  }
  const double dot = inner(layer, *x, y);
  const double rho_x = x->weight / both.weight * (dot / x->square);
  const double rho_y = y.weight / both.weight * (dot / y.square);
  both.exponent = x->exponent > y.exponent ? x->exponent : y.exponent;
  const double unit_x = ldexp(1.0, x->exponent - both.exponent);
  const double unit_y = ldexp(1.0, y.exponent - both.exponent);
  multiply(layer, *x, unit_x - rho_x * unit_y);
  multiply(layer, y, unit_y - rho_y * unit_x);
  finish(layer, &both);
  *x = both;
}

/// The vector of the whole tree. Runs of 2^k ranks are merged as soon as they
/// are full, what is left at the end from the right: the split after the
/// largest power of two, without recursion.
TORCH_SM3_INLINE Node tree(const Layer& layer, const double* weights) {
  Node open[kMaxDepth];
  int depth = 0;
  for (int64_t i = 0; i < layer.p; ++i) {
    const double square = layer.gram[i * layer.p + i];
    const double weight = weights == nullptr ? 1.0 : weights[i];
    const bool active = square > 0.0 && weight > 0.0;
    layer.exponents[i] = active ? norm_exponent(square) : 0;
    layer.a[i] = active ? 1.0 : 0.0;
    Node leaf{i, i + 1, layer.exponents[i], active ? weight : 0.0, 0.0};
    leaf.square = active ? scaled(layer, i, i) : 0.0;
    open[depth++] = leaf;
    while (depth > 1 && open[depth - 2].last - open[depth - 2].first ==
                            open[depth - 1].last - open[depth - 1].first) {
      merge(layer, &open[depth - 2], open[depth - 1]);
      --depth;
    }
  }
  for (; depth > 1; --depth) {
    merge(layer, &open[depth - 2], open[depth - 1]);
  }
  return open[0];
}

TORCH_SM3_INLINE double
active_leaves(const double* gram, int64_t p, const double* weights) {
  double count = 0.0;
  for (int64_t i = 0; i < p; ++i) {
    const bool given = weights == nullptr || weights[i] > 0.0;
    count += given && gram[i * p + i] > 0.0 ? 1.0 : 0.0;
  }
  return count;
}

/// Trax's one-round form: projections on the leaves themselves.
TORCH_SM3_INLINE double
one_round(const double* gram, int64_t p, int64_t i, double active) {
  const double own = gram[i * p + i];
  double others = 0.0;
  for (int64_t j = 0; j < p; ++j) {
    others += j == i ? 0.0 : gram[i * p + j];
  }
  return own == 0.0 ? 0.0 : 1.0 - others / own / active;
}

} // namespace detail

/// Writes the coefficients c_0..c_{p-1} of one layer.
///
/// \param gram      p x p inner products of the leaves, row by row
/// \param p         number of leaves
/// \param mode      see Mode
/// \param weights   weights of the leaves (tree only), or null for all 1
/// \param scale     factor of every coefficient
/// \param exponents p integers of scratch
/// \param c         the result
TORCH_SM3_INLINE void adasum_layer_coefficients(
    const double* gram,
    int64_t p,
    Mode mode,
    const double* weights,
    double scale,
    int32_t* exponents,
    double* c) {
  bool finite = true;
  for (int64_t k = 0; k < p * p; ++k) {
    // Also false for NaN.
    finite = finite && fabs(gram[k]) <= 0x1.fffffffffffffp+1023;
  }
  const bool projects = mode == Mode::tree || mode == Mode::psum;
  if (p == 1 || !projects || !finite) {
    const double mean = 1.0 / static_cast<double>(p);
    const double value = p == 1 || mode == Mode::sum ? 1.0
                         : mode == Mode::mean        ? mean
                                                     : NAN;
    for (int64_t i = 0; i < p; ++i) {
      c[i] = value * scale;
    }
    return;
  }
  const double active = detail::active_leaves(gram, p, weights);
  if (mode == Mode::psum) {
    for (int64_t i = 0; i < p; ++i) {
      c[i] = scale * detail::one_round(gram, p, i, active);
    }
    return;
  }
  const detail::Layer layer{gram, p, exponents, c, active};
  const detail::Node root = detail::tree(layer, weights);
  for (int64_t i = 0; i < p; ++i) {
    c[i] = scale * ldexp(c[i], root.exponent - exponents[i]);
  }
}

} // namespace torch_sm3::distributed
