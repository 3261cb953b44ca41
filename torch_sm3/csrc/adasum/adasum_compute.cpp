// SPDX-License-Identifier: Apache-2.0
#include "adasum_compute.h"

#include "adasum_cpu.h"
#include "scalar_kind.h"

#include <ATen/ops/empty.h>

#include <vector>

namespace torch_sm3::distributed {
namespace {

std::vector<const void*> pointers_of(const Rows& rows) {
  std::vector<const void*> pointers;
  for (const at::Tensor& row : rows.data) {
    pointers.push_back(row.const_data_ptr());
  }
  return pointers;
}

ScalarKind kind_of(const Rows& rows) {
  return torch_sm3::scalar_kind(rows.data[0].scalar_type());
}

// The tiles of a run, counted from its first element.
std::vector<Tile> tiles_from_zero(const Layout& layout, Range range) {
  const auto begin = layout.tiles().begin();
  std::vector<Tile> tiles(begin + range.first, begin + range.last);
  const int64_t origin = layout.elements_of(range).first;
  for (Tile& tile : tiles) {
    tile.start -= origin;
  }
  return tiles;
}

} // namespace

at::Tensor dots_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    Accumulate /*accumulate*/) {
  const auto p = static_cast<int64_t>(rows.data.size());
  at::Tensor partial = at::empty(
      {tiles.size(), pair_count(p)}, rows.data[0].options().dtype(at::kDouble));
  const std::vector<const void*> pointers = pointers_of(rows);
  dots_cpu(
      {pointers.data(), p, kind_of(rows)},
      tiles_from_zero(layout, tiles),
      partial.mutable_data_ptr<double>());
  return partial;
}

at::Tensor
add_tiles(const Layout& layout, Range layers, const at::Tensor& partial) {
  const int64_t pairs = partial.size(1);
  int64_t p = 1;
  while (pair_count(p) < pairs) {
    ++p;
  }
  at::Tensor gram = at::empty({layers.size(), p, p}, partial.options());
  std::vector<int64_t> tiles_of_layer;
  for (int64_t layer = layers.first; layer < layers.last; ++layer) {
    tiles_of_layer.push_back(layout.tiles_of(layer).size());
  }
  add_tiles_cpu(
      partial.const_data_ptr<double>(),
      tiles_of_layer,
      p,
      gram.mutable_data_ptr<double>());
  return gram;
}

void combine_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& coefficients,
    const at::Tensor& out) {
  const std::vector<const void*> pointers = pointers_of(rows);
  combine_cpu(
      {pointers.data(), static_cast<int64_t>(rows.data.size()), kind_of(rows)},
      coefficients.const_data_ptr<double>(),
      tiles_from_zero(layout, tiles),
      out.mutable_data_ptr());
}

} // namespace torch_sm3::distributed
