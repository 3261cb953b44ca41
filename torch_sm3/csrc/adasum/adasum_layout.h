// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Layers one behind the other in a flat buffer, cut into tiles.

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace torch_sm3::distributed {

/// A run of at most kTile elements of one layer; `start` counts from the
/// beginning of the flat buffer.
struct Tile {
  int64_t layer, start, size;
};

/// A run of consecutive tiles, layers or elements: first <= k < last.
struct Range {
  int64_t first, last;
  int64_t size() const {
    return last - first;
  }
};

/// Cuts layers that stand one behind the other into tiles, in order.
std::vector<Tile> cut_into_tiles(c10::IntArrayRef sizes);

/// The layers of a flat buffer and their tiles, counted from zero.
class Layout {
 public:
  explicit Layout(std::vector<int64_t> sizes);

  const std::vector<int64_t>& sizes() const {
    return sizes_;
  }
  const std::vector<Tile>& tiles() const {
    return tiles_;
  }
  int64_t layers() const {
    return static_cast<int64_t>(sizes_.size());
  }
  int64_t elements() const {
    return elements_;
  }
  /// Tiles of one layer; none for an empty one.
  Range tiles_of(int64_t layer) const {
    return {first_tile_[layer], first_tile_[layer + 1]};
  }
  /// Elements of a run of tiles.
  Range elements_of(Range tiles) const;

 private:
  std::vector<int64_t> sizes_;
  std::vector<Tile> tiles_;
  std::vector<int64_t> first_tile_; // L + 1
  int64_t elements_ = 0;
};

} // namespace torch_sm3::distributed
