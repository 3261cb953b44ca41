// SPDX-License-Identifier: Apache-2.0
#include "adasum_pieces.h"

#include "adasum_kernel.h"

#include <algorithm>

namespace torch_sm3::distributed {
namespace {

// How many layers have no tile from `tile` on.
int64_t ended_before(const Layout& layout, Range layers, int64_t tile) {
  int64_t count = layers.first;
  while (count < layers.last && layout.tiles_of(count).last <= tile) {
    ++count;
  }
  return count;
}

} // namespace

Range tiles_of_layers(const Layout& layout, Range layers) {
  if (layers.size() == 0) {
    return {0, 0};
  }
  return {
      layout.tiles_of(layers.first).first,
      layout.tiles_of(layers.last - 1).last};
}

std::vector<Piece> cut_into_pieces(
    const Layout& layout,
    Range layers,
    int64_t elements,
    bool together) {
  const Range all = tiles_of_layers(layout, layers);
  const int64_t total = layout.elements_of(all).size();
  const int64_t count = std::max<int64_t>(
      (total + elements - 1) / std::max<int64_t>(elements, 1), 1);
  // A cut falls on the first tile that reaches its share of the elements.
  const int64_t share = std::max((total + count - 1) / count, int64_t{1});
  std::vector<Piece> pieces;
  for (int64_t first = all.first, last = all.first; first < all.last;
       first = last) {
    int64_t size = 0;
    do {
      size += layout.tiles()[last++].size;
    } while (last < all.last && size < share &&
             size + layout.tiles()[last].size <= std::max(elements, share));
    const Range touched{
        layout.tiles()[first].layer, layout.tiles()[last - 1].layer + 1};
    pieces.push_back(
        {{first, last},
         touched,
         together && last < all.last
             ? layers.first
             : ended_before(layout, {touched.first, layers.last}, last),
         0});
  }
  for (size_t k = pieces.size(); k-- > 0;) {
    // A layer that goes on ends with the next piece, or goes on there too.
    size_t ready = k;
    if (pieces[k].ended < pieces[k].layers.last) {
      const bool next = pieces[k + 1].ended >= pieces[k].layers.last;
      ready = next ? k + 1 : pieces[k + 1].ready;
    }
    pieces[k].ready = ready;
  }
  return pieces;
}

std::vector<Range> cut_into_windows(const Layout& layout, int64_t elements) {
  std::vector<Range> windows;
  for (int64_t first = 0, last = 0; first < layout.layers(); first = last) {
    int64_t size = layout.sizes()[last++];
    while (last < layout.layers() && size + layout.sizes()[last] <= elements) {
      size += layout.sizes()[last++];
    }
    windows.push_back({first, last});
  }
  return windows;
}

} // namespace torch_sm3::distributed
