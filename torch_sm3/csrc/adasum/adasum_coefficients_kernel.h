// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The coefficients of many layers: what one thread of any device does.

#include "adasum_math.h"

#include <cstdint>

namespace torch_sm3::distributed {

/// Layers one behind the other; see LayerRule, LayerInput and LayerOutput.
struct LayerTable {
  LayerRule rule;
  int64_t layers;
  const double* gram;      ///< [L, p, p]
  const int32_t* shifts;   ///< [L, p] or null
  const NodeState* states; ///< [L, p] or null
  const bool* excluded;    ///< [L] or null
  double* numbers;         ///< [L, layer_scratch]
  int32_t* integers;       ///< [L, layer_integers]
  double* c;               ///< [L, p]
  double* report;          ///< [L, 2]
  NodeState* roots;        ///< [L]
};

TORCH_SM3_INLINE void
coefficients_of_layer(const LayerTable& table, int64_t layer) {
  const int64_t p = table.rule.p;
  const int64_t nodes = table.rule.node_count;
  const int64_t first = layer * p;
  adasum_layer_coefficients(
      table.rule,
      {table.gram + first * p,
       table.shifts == nullptr ? nullptr : table.shifts + first,
       table.states == nullptr ? nullptr : table.states + first,
       table.excluded != nullptr && table.excluded[layer]},
      table.numbers + layer * layer_scratch(p, nodes),
      table.integers + layer * layer_integers(p, nodes),
      {table.c + first, table.report + 2 * layer, table.roots + layer});
}

} // namespace torch_sm3::distributed
