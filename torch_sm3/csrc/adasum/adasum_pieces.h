// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// A bucket cut into pieces that follow each other through an exchange.

#include "adasum_layout.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_sm3::distributed {

/// A run of tiles that is exchanged in one message per peer. Layers may begin
/// and end anywhere in it.
struct Piece {
  Range tiles;
  Range layers; ///< that have tiles here
  /// The layers before this one have coefficients after this piece.
  int64_t ended;
  /// The piece after which all of `layers` have ended.
  size_t ready;
};

/// Cuts the tiles of a run of layers into pieces of about equal length.
///
/// \param elements of one piece, at most, but for a single tile
/// \param together the coefficients of all layers are computed at the end
std::vector<Piece> cut_into_pieces(
    const Layout& layout,
    Range layers,
    int64_t elements,
    bool together);

/// The tiles of a run of layers.
Range tiles_of_layers(const Layout& layout, Range layers);

/// Runs of whole layers of at most `elements` elements, but for a single layer.
std::vector<Range> cut_into_windows(const Layout& layout, int64_t elements);

} // namespace torch_sm3::distributed
