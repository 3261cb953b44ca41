// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Adasum of whole buckets on the CPU: layers cut into tiles, tiles spread over
/// the threads of at::parallel_for.

#include "adasum_kernel.h"
#include "adasum_layout.h"

#include <c10/util/ArrayRef.h>

#include <vector>

namespace torch_sm3::distributed {

/// Leaves of equal length: one pointer per rank.
struct Leaves {
  const void* const* rows;
  int64_t p;
  ScalarKind kind;
};

/// Writes the packed inner products of each tile, [T, p (p + 1) / 2].
void dots_cpu(
    const Leaves& leaves,
    const std::vector<Tile>& tiles,
    double* partial);

/// Adds the inner products of the tiles of each layer, in order, to Gram
/// matrices [L, p, p].
void add_tiles_cpu(
    const double* partial,
    c10::IntArrayRef tiles_of_layer,
    int64_t p,
    double* gram);

/// Writes the Gram matrices of all layers, [L, p, p].
void gram_cpu(const Leaves& leaves, c10::IntArrayRef sizes, double* gram);

/// Writes the weighted sum of the leaves; `out` may be one of the rows.
void combine_cpu(
    const Leaves& leaves,
    const double* coefficients,
    const std::vector<Tile>& tiles,
    void* out);

} // namespace torch_sm3::distributed
