// SPDX-License-Identifier: Apache-2.0
#include "adasum_layout.h"

#include "adasum_kernel.h"

#include <algorithm>
#include <utility>

namespace torch_sm3::distributed {

std::vector<Tile> cut_into_tiles(c10::IntArrayRef sizes) {
  std::vector<Tile> tiles;
  int64_t layer_start = 0;
  for (size_t layer = 0; layer < sizes.size(); ++layer) {
    for (int64_t begin = 0; begin < sizes[layer]; begin += kTile) {
      tiles.push_back(
          {static_cast<int64_t>(layer),
           layer_start + begin,
           std::min(kTile, sizes[layer] - begin)});
    }
    layer_start += sizes[layer];
  }
  return tiles;
}

Layout::Layout(std::vector<int64_t> sizes)
    : sizes_(std::move(sizes)), tiles_(cut_into_tiles(sizes_)) {
  first_tile_.reserve(sizes_.size() + 1);
  first_tile_.push_back(0);
  for (const int64_t size : sizes_) {
    first_tile_.push_back(first_tile_.back() + (size + kTile - 1) / kTile);
    elements_ += size;
  }
}

Range Layout::elements_of(Range tiles) const {
  if (tiles.size() == 0) {
    return {0, 0};
  }
  const Tile& last = tiles_[tiles.last - 1];
  return {tiles_[tiles.first].start, last.start + last.size};
}

} // namespace torch_sm3::distributed
