// SPDX-License-Identifier: Apache-2.0
#include "adasum_sums.h"

#include "adasum_kernel.h"
#include "adasum_tags.h"
#include "adasum_upload.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace torch_sm3::distributed {
namespace {

Range intersect(Range a, Range b) {
  const int64_t first = std::clamp(a.first, b.first, b.last);
  return {first, std::max(first, std::min(a.last, b.last))};
}

Range shifted(Range range, int64_t by) {
  return {range.first + by, range.last + by};
}

// The upper triangle of Gram matrices, row by row.
at::Tensor packed(const at::Tensor& gram) {
  const int64_t p = gram.size(-1);
  std::vector<int64_t> places;
  for (int64_t i = 0; i < p; ++i) {
    for (int64_t j = i; j < p; ++j) {
      places.push_back(i * p + j);
    }
  }
  return gram.reshape({-1, p * p})
      .index_select(1, to_device(places, gram.device()));
}

void reduce_into(
    Reduction reduction,
    at::Tensor& into,
    const at::Tensor& more) {
  if (reduction == Reduction::sum) {
    into.add_(more);
  } else {
    into.copy_(at::maximum(into, more));
  }
}

Step step_of(Reduction reduction) {
  return reduction == Reduction::sum ? Step::sums : Step::largest;
}

// Recursive doubling: after each round both partners hold the same bits, since
// a + b is b + a.
void reduce_over_block(
    const StageContext& context,
    Reduction reduction,
    int64_t turn,
    at::Tensor& values) {
  for (int level = 0; level <= context.spec.level; ++level) {
    at::Tensor other = at::empty_like(values);
    const std::vector<int> pair = context.grid.members(level);
    const int partner = pair[1 - context.grid.digit(level)];
    const auto posted = post_step(
        context.job,
        {step_of(reduction), context.spec.level, level, turn},
        {{partner, other.view({-1})}},
        {{partner, values.view({-1})}});
    context.job.transport.wait(*posted);
    reduce_into(reduction, values, other);
  }
}

void reduce_over_shards(
    const StageContext& context,
    Reduction reduction,
    int64_t turn,
    at::Tensor& values) {
  Transport& shards = *context.job.shards;
  const at::Tensor all =
      at::empty({shards.size(), values.numel()}, values.options());
  all[shards.rank()].copy_(values.view({-1}));
  std::vector<Transport::Message> receives, sends;
  for (int peer = 0; peer < shards.size(); ++peer) {
    if (peer != shards.rank()) {
      receives.push_back({peer, all[peer]});
      sends.push_back({peer, all[shards.rank()]});
    }
  }
  // The shards' layouts may differ, and with them what names a call.
  const auto posted = shards.post(
      std::move(receives),
      std::move(sends),
      tag_of_step(
          kHashStart, {step_of(reduction), context.spec.level, 0, turn}),
      describe_step(context.job.what, step_of(reduction)) + " of shards");
  shards.wait(*posted);
  values.copy_(all[0].view(values.sizes()));
  for (int peer = 1; peer < shards.size(); ++peer) {
    reduce_into(reduction, values, all[peer].view(values.sizes()));
  }
}

} // namespace

Range own_within(const StageContext& context, size_t piece, Range within) {
  return intersect(within, context.owned(piece));
}

TileValues share_tiles(
    const StageContext& context,
    const StepName& name,
    Range within,
    const at::Tensor& own) {
  const PhaseTimer timer(context.job.outcome, Phase::exchange);
  const auto piece = static_cast<size_t>(name.index);
  if (context.spec.summed) {
    return {own_within(context, piece, within), own, nullptr};
  }
  // Where nobody is an owner, the ranks below this level hold all tiles.
  const Range block =
      context.grid.block(context.spec.level + (context.spec.whole ? 0 : 1));
  const Range tiles = intersect(context.pieces[piece].tiles, within);
  if (block.size() == 1) {
    return {tiles, own, nullptr};
  }
  TileValues shared{
      tiles, at::empty({tiles.size(), own.size(1)}, own.options()), nullptr};
  std::vector<Part> parts;
  for (int64_t k = block.first; k < block.last; ++k) {
    const int rank = static_cast<int>(k);
    const Range part = intersect(context.owned(piece, rank), within);
    parts.push_back({rank, shifted(part, -tiles.first)});
    if (rank == context.grid.rank()) {
      shared.values.narrow(0, parts.back().rows.first, part.size()).copy_(own);
    }
  }
  shared.posted = post_parts(context.job, name, parts, shared.values);
  return shared;
}

void wait_for(const StageContext& context, TileValues& shared) {
  if (shared.posted != nullptr) {
    const PhaseTimer timer(context.job.outcome, Phase::exchange);
    context.job.transport.wait(*shared.posted);
    shared.posted.reset();
  }
}

void add_to_layers(
    const Layout& layout,
    const TileValues& shared,
    const at::Tensor& gram) {
  if (shared.tiles.size() == 0) {
    return;
  }
  const auto& tiles = layout.tiles();
  const Range layers{
      tiles[shared.tiles.first].layer, tiles[shared.tiles.last - 1].layer + 1};
  std::vector<int64_t> sizes;
  for (int64_t layer = layers.first; layer < layers.last; ++layer) {
    sizes.push_back(
        intersect(layout.tiles_of(layer), shared.tiles).size() * kTile);
  }
  at::Tensor values = shared.values;
  if (layout.tiles_of(layers.first).first < shared.tiles.first) {
    // What the first layer has so far goes before its next tile.
    sizes[0] += kTile;
    values = at::cat({packed(gram.narrow(0, layers.first, 1)), values});
  }
  const Layout run(std::move(sizes));
  gram.narrow(0, layers.first, layers.size())
      .copy_(add_tiles(run, {0, layers.size()}, values));
}

void reduce_layers(
    const StageContext& context,
    Reduction reduction,
    int64_t turn,
    at::Tensor values) {
  const PhaseTimer timer(context.job.outcome, Phase::exchange);
  if (context.spec.summed) {
    reduce_over_block(context, reduction, turn, values);
  }
  if (context.job.shards != nullptr && context.job.shards->size() > 1) {
    reduce_over_shards(context, reduction, turn, values);
  }
}

} // namespace torch_sm3::distributed
