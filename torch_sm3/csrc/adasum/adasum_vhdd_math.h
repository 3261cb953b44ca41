// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The pair rule for two nodes of which only the inner products and what their
/// earlier stages left are known, once for host and device.

#include "adasum_tree_math.h"
#include "scalar_math.h"

#include <cmath>
#include <cstdint>

namespace torch_sm3::distributed {

/// Two nodes a and b of one layer, held as 2^-exponent times themselves.
struct NodePair {
  double dot;                     ///< of what is held
  double square_a, square_b;      ///< of what is held
  double weight_a, weight_b;      ///< 0: absent
  double spread_a, spread_b;      ///< S of the nodes themselves
  int32_t exponent_a, exponent_b; ///< 0 where vectors are held as they are
};

/// Their combination r, held as 2^-exponent r.
struct PairResult {
  double factor_a, factor_b; ///< what is held of r = sum of factor * held
  double weight;
  double spread;
  int32_t exponent;
  double kappa;   ///< S / |r|; 1 where nothing was combined
  bool cancelled; ///< below the guard: r is zero and absent from here on
};

/// Applies the pair rule; a node of weight 0 is absent, a non-finite product
/// spoils the result.
///
/// \param pair   see NodePair; a gradient has weight 1 (its given weight), or 0
///               if it is all zero, and its norm for S
/// \param active active leaves of the layer or, if that is unknown, the number
///               of ranks
TORCH_SM3_INLINE PairResult
adasum_node_pair(const NodePair& pair, double active) {
  // The two as leaves of a layer of their own.
  const double gram[4] = {pair.square_a, pair.dot, pair.dot, pair.square_b};
  const int32_t shifts[2] = {pair.exponent_a, pair.exponent_b};
  const NodeState states[2] = {
      {pair.weight_a, pair.spread_a, 0.0}, {pair.weight_b, pair.spread_b, 0.0}};
  int32_t exponents[2];
  double a[2], c[2];
  detail::Report report{1.0, 0.0};
  const detail::Layer layer{
      gram, 2, nullptr, shifts, states, exponents, a, c, active, &report};
  if (!detail::all_finite(gram, 4)) {
    return {NAN, NAN, pair.weight_a + pair.weight_b, NAN, 0, NAN, false};
  }
  detail::find_exponents(layer);
  const detail::Node root = detail::tree(layer, 0, 2);
  const bool has_a = detail::is_active(layer, 0);
  const bool has_b = detail::is_active(layer, 1);
  const bool takes_b = has_b && (!has_a || shifts[1] > shifts[0]);
  const int32_t exponent = takes_b ? shifts[1] : has_a ? shifts[0] : 0;
  return {
      ldexp(c[0], -exponent),
      ldexp(c[1], -exponent),
      root.weight,
      root.weight > 0.0 ? ldexp(root.spread, root.exponent) : 0.0,
      exponent,
      report.kappa,
      report.cancelled > 0.0};
}

} // namespace torch_sm3::distributed
