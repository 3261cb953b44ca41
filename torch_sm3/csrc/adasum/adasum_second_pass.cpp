// SPDX-License-Identifier: Apache-2.0
#include "adasum_second_pass.h"

#include "adasum_kernel.h"
#include "adasum_scales.h"
#include "adasum_upload.h"

#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace torch_sm3::distributed {
namespace {

// Powers of two in this range are normal numbers, and so are their inverses.
constexpr int64_t kLargestShift = 1022;

at::Tensor
layers_of_tiles(const Layout& layout, Range tiles, const at::Device& device) {
  std::vector<int64_t> layers;
  for (int64_t t = tiles.first; t < tiles.last; ++t) {
    layers.push_back(layout.tiles()[t].layer);
  }
  return to_device(layers, device);
}

// The shortest run of layers that holds all that need a second pass.
Range needed_layers(Range layers, const at::Tensor& need) {
  const auto* flags = need.const_data_ptr<bool>();
  const auto* end = flags + need.numel();
  const auto* first = std::find(flags, end, true);
  const auto* last = end;
  while (last > first && !last[-1]) {
    --last;
  }
  return {layers.first + (first - flags), layers.first + (last - flags)};
}

// Calls `compute` for the tiles of each piece that belong to the layers, shares
// what it returns, and gives `use` the values of the whole piece.
template <class Compute, class Use>
void for_pieces(
    const StageContext& context,
    Step step,
    int64_t turn,
    Range tiles,
    Range pieces,
    const RowsOfPiece& rows_of,
    const Compute& compute,
    const Use& use) {
  for (int64_t k = pieces.first; k < pieces.last; ++k) {
    const auto piece = static_cast<size_t>(k);
    const Range own = own_within(context, piece, tiles);
    const Rows& rows = rows_of(piece);
    const int64_t begin = context.owned(piece).first;
    TileValues shared = share_tiles(
        context,
        {step, context.spec.level, k, turn},
        tiles,
        compute(rows, begin, own));
    wait_for(context, shared);
    use(shared);
  }
}

// int32 [layers, p]: exponents of the largest elements of whole leaves.
at::Tensor exponents_of_layers(
    const StageContext& context,
    Range layers,
    Range pieces,
    int64_t turn,
    const RowsOfPiece& rows_of,
    const at::Tensor& flags) {
  const Layout& layout = context.layout();
  const auto p = static_cast<int64_t>(context.members.size());
  at::Tensor largest = at::full(
      {layers.size(), p}, kNoExponent, flags.options().dtype(at::kInt));
  for_pieces(
      context,
      Step::exponents,
      turn,
      tiles_of_layers(layout, layers),
      pieces,
      rows_of,
      [&](const Rows& rows, int64_t begin, Range own) {
        return exponents_of_tiles(
            layout, own, rows_within(layout, rows, begin, own, {}), flags);
      },
      [&](const TileValues& shared) {
        const at::Tensor index =
            layers_of_tiles(layout, shared.tiles, flags.device())
                .sub(layers.first)
                .unsqueeze(1)
                .expand({shared.tiles.size(), p});
        largest.scatter_reduce_(0, index, shared.values, "amax");
      });
  reduce_layers(context, Reduction::max, turn, largest);
  return at::where(largest.eq(kNoExponent), at::zeros_like(largest), largest)
      .clamp(-kLargestShift, kLargestShift);
}

} // namespace

Rows rows_within(
    const Layout& layout,
    const Rows& rows,
    int64_t begin,
    Range tiles,
    const at::Tensor& shifts) {
  Rows result;
  const Range elements = layout.elements_of(tiles);
  const int64_t skipped = layout.elements_of({begin, tiles.first}).size();
  for (const at::Tensor& row : rows.data) {
    result.data.push_back(
        row.narrow(0, elements.size() == 0 ? 0 : skipped, elements.size()));
  }
  if (rows.scales.defined()) {
    result.scales = rows.scales.narrow(
        0, tiles.size() == 0 ? 0 : tiles.first - begin, tiles.size());
  }
  if (shifts.defined()) {
    result.scales = scales_of_tiles(layout, tiles, result, shifts);
  }
  return result;
}

bool second_pass(
    const StageContext& context,
    Range layers,
    Range pieces,
    int64_t turn,
    const RowsOfPiece& rows_of,
    const at::Tensor& gram,
    const at::Tensor& shifts) {
  const Layout& layout = context.layout();
  const auto of = [&](const at::Tensor& all) {
    return all.narrow(0, layers.first, layers.size());
  };
  at::Tensor need = need_second_pass(of(gram), context.job.plan.accumulate);
  if (context.job.transport.host_waits()) {
    const at::Tensor seen = need.to(at::kCPU).contiguous();
    const Range needed = needed_layers(layers, seen);
    if (needed.size() == 0) {
      return false;
    }
    need = need.narrow(0, needed.first - layers.first, needed.size());
    layers = needed;
  }
  const at::Tensor flags = at::zeros({layout.layers()}, need.options());
  of(flags).copy_(need);
  of(shifts).copy_(
      exponents_of_layers(context, layers, pieces, turn, rows_of, flags));
  const at::Tensor again = at::zeros_like(gram);
  for_pieces(
      context,
      Step::dots,
      turn,
      tiles_of_layers(layout, layers),
      pieces,
      rows_of,
      [&](const Rows& rows, int64_t begin, Range own) {
        at::Tensor partial =
            at::zeros({own.size(), pair_count(gram.size(1))}, gram.options());
        repeat_dots_of_tiles(
            layout,
            own,
            rows_within(layout, rows, begin, own, shifts),
            flags,
            partial);
        return partial;
      },
      [&](const TileValues& shared) { add_to_layers(layout, shared, again); });
  reduce_layers(context, Reduction::sum, turn, of(again));
  of(gram).copy_(
      at::where(need.unsqueeze(1).unsqueeze(2), of(again), of(gram)));
  return true;
}

} // namespace torch_sm3::distributed
