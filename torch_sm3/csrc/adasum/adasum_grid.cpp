// SPDX-License-Identifier: Apache-2.0
#include "adasum_grid.h"

#include <utility>

namespace torch_sm3::distributed {

Grid::Grid(std::vector<int> radices, int rank)
    : radices_(std::move(radices)), strides_{1}, rank_(rank) {
  for (const int radix : radices_) {
    strides_.push_back(strides_.back() * radix);
  }
}

std::vector<int> Grid::members(int level) const {
  std::vector<int> ranks;
  const int first = rank_ - digit(level) * strides_[level];
  for (int k = 0; k < radices_[level]; ++k) {
    ranks.push_back(first + k * strides_[level]);
  }
  return ranks;
}

Range Grid::block(int levels) const {
  const int64_t size = strides_[levels];
  const int64_t first = rank_ / size * size;
  return {first, first + size};
}

Range Grid::owned(Range tiles, int rank, int levels) const {
  for (int level = 0; level < levels; ++level) {
    tiles =
        split(tiles, radices_[level], rank / strides_[level] % radices_[level]);
  }
  return tiles;
}

} // namespace torch_sm3::distributed
