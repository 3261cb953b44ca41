// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Inner products of layers from those of tiles that many ranks own.

#include "adasum_stage.h"

#include <memory>

namespace torch_sm3::distributed {

/// One value per tile of a run, on their way from the owners to a block of
/// ranks.
struct TileValues {
  Range tiles;
  at::Tensor values; ///< [tiles, ...]
  std::unique_ptr<Transport::Posted> posted;
};

/// Shares what a rank computed for its tiles of a piece.
///
/// \param within only tiles of this run
/// \param own    [own tiles within, columns]
TileValues share_tiles(
    const StageContext& context,
    const StepName& name,
    Range within,
    const at::Tensor& own);

/// The tiles of a piece that this rank combines, within a run.
Range own_within(const StageContext& context, size_t piece, Range within);

void wait_for(const StageContext& context, TileValues& shared);

/// Adds the inner products of more tiles to the Gram matrices [L, p, p] of
/// their layers: tile by tile in ascending order, wherever pieces begin and
/// end.
void add_to_layers(
    const Layout& layout,
    const TileValues& shared,
    const at::Tensor& gram);

/// How equal shapes of many ranks become one.
enum class Reduction : int8_t { sum, max };

/// Reduces over the block of a stage whose layers are summed, then over the
/// shards, always in rank order: equal bits on all ranks.
void reduce_layers(
    const StageContext& context,
    Reduction reduction,
    int64_t turn,
    at::Tensor values);

} // namespace torch_sm3::distributed
