// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// One level of a run: ranks that differ in one digit exchange their leaves,
/// compute coefficients and combine the tiles that they own.
///
/// Pieces follow each other: while the leaves of one are computed with, those
/// of the next ones travel. A piece keeps its leaves until the coefficients of
/// its layers are known. Where the scratch memory has no room for that (a layer
/// larger than the cap), some pieces drop them and exchange them once more.

#include "adasum_algorithms.h"
#include "adasum_grid.h"
#include "adasum_pieces.h"
#include "adasum_steps.h"
#include "adasum_wire.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace torch_sm3::distributed {

/// The elements of a bucket, or of the parts of its pieces that a rank holds.
struct Held {
  at::Tensor data;
  /// Per piece: number of its first element in the bucket that `data` leaves
  /// out before it. Empty: nothing is left out.
  std::vector<int64_t> left_out;

  at::Tensor narrow(size_t piece, Range elements) const {
    const int64_t shift = left_out.empty() ? 0 : left_out[piece];
    // A run without tiles has no place.
    const int64_t first = elements.size() == 0 ? 0 : elements.first - shift;
    return data.narrow(0, first, elements.size());
  }
};

/// What a level does; equal on all its members.
struct StageSpec {
  int level;
  /// All members compute all tiles, none is an owner.
  bool whole;
  /// Inner products are added over a block of ranks layer by layer, instead of
  /// being shared tile by tile.
  bool summed;
  /// The last level returns the result to all ranks.
  bool last;
  Rule rule;
  /// bool [L] on the device of the leaf; undefined: no layer gets the mean.
  at::Tensor means;
  /// float64 [L, 3] of this rank's leaf, from the level before; or undefined.
  at::Tensor carried;
  Held source;
  Held target;
  Wire wire;
  /// Of the result, of the last level only.
  Wire return_wire;
};

/// What the parts of a stage share.
struct StageContext {
  const Job& job;
  const Grid& grid;
  const StageSpec& spec;
  const std::vector<Piece>& pieces;
  std::vector<int> members;
  size_t me; ///< position in `members`

  const Layout& layout() const {
    return job.plan.layout;
  }
  /// The tiles of a piece that a rank holds before this level.
  Range held(size_t piece, int rank) const {
    return grid.owned(pieces[piece].tiles, rank, spec.level);
  }
  /// The tiles of a piece that a rank combines.
  Range owned(size_t piece, int rank) const {
    const int levels = spec.whole ? spec.level : spec.level + 1;
    return grid.owned(pieces[piece].tiles, rank, levels);
  }
  Range owned(size_t piece) const {
    return owned(piece, grid.rank());
  }
  /// This rank's leaf, or a part of it.
  at::Tensor leaf(size_t piece, Range tiles) const {
    return spec.source.narrow(piece, layout().elements_of(tiles));
  }
  at::Tensor result(size_t piece, Range tiles) const {
    return spec.target.narrow(piece, layout().elements_of(tiles));
  }
};

StageContext make_context(
    const Job& job,
    const Grid& grid,
    const StageSpec& spec,
    const std::vector<Piece>& pieces);

/// What a stage knows of its layers.
struct StageResult {
  at::Tensor gram;         ///< float64 [L, members, members]
  at::Tensor coefficients; ///< float64 [L, members]
  at::Tensor report;       ///< float64 [L, 2]
  at::Tensor carried;      ///< float64 [L, 3]
};

/// Bytes of scratch memory that one piece occupies, at most.
int64_t slot_bytes(const StageContext& context);

/// Runs a level over the pieces of some layers.
///
/// \param layers  whose pieces these are
/// \param result  its rows of these layers are written
void run_stage(
    const StageContext& context,
    Range layers,
    const at::Tensor& scratch,
    StageResult* result);

} // namespace torch_sm3::distributed
