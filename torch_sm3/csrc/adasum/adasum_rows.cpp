// SPDX-License-Identifier: Apache-2.0
#include "adasum_rows.h"

#include <ATen/ops/stack.h>

#include <algorithm>
#include <utility>

namespace torch_sm3::distributed {
namespace {

// The largest message of a rank's part of a piece after some levels.
int64_t largest(const StageContext& context, const Wire& wire, int levels) {
  int64_t bytes = 0;
  for (const Piece& piece : context.pieces) {
    for (int rank = 0; rank < context.grid.size(); ++rank) {
      const Range part = context.grid.owned(piece.tiles, rank, levels);
      bytes = std::max(bytes, wire.bytes(context.layout(), part));
    }
  }
  return aligned(bytes);
}

} // namespace

Slots::Slots(at::Tensor memory, int64_t bytes)
    : memory_(std::move(memory)),
      bytes_(bytes),
      in_use_(static_cast<size_t>(memory_.numel() / bytes), false) {}

bool Slots::any_free() const {
  return std::find(in_use_.begin(), in_use_.end(), false) != in_use_.end();
}

size_t Slots::take() {
  const auto found = std::find(in_use_.begin(), in_use_.end(), false);
  TORCH_INTERNAL_ASSERT(found != in_use_.end());
  *found = true;
  return static_cast<size_t>(found - in_use_.begin());
}

SlotPlan::SlotPlan(const StageContext& context)
    : result(0), message(0), coded(0), total(kAlignment) {
  const StageSpec& spec = context.spec;
  const auto others = static_cast<int64_t>(context.members.size()) - 1;
  const int levels = spec.whole ? spec.level : spec.level + 1;
  message = largest(context, spec.wire, levels);
  coded = !spec.wire.coded() ? 0 : spec.whole ? 1 : others + 1;
  int64_t after = 0;
  if (spec.last && spec.return_wire.coded()) {
    result = largest(context, spec.return_wire, levels);
    // The messages of a step back take the place of the leaves.
    for (int level = 0; level < levels; ++level) {
      const int64_t step = largest(context, spec.return_wire, level + 1) *
                           context.grid.radix(level);
      after = std::max(after, step);
    }
  }
  const int64_t before = (others + coded) * message;
  total = std::max(result + std::max(before, after), kAlignment);
}

int64_t slot_bytes(const StageContext& context) {
  return SlotPlan(context).total;
}

RowExchange::RowExchange(const StageContext& context, Slots& slots)
    : context_(context),
      plan_(context),
      slots_(slots),
      states_(context.pieces.size()) {}

void RowExchange::post(size_t piece) {
  const PhaseTimer timer(context_.job.outcome, Phase::exchange);
  State& state = states_[piece];
  state.slot = slots_.take();
  if (context_.spec.wire.coded()) {
    post_coded(piece, state);
  } else {
    post_plain(piece, state);
  }
}

void RowExchange::post_plain(size_t piece, State& state) {
  const StageContext& c = context_;
  const Range mine = c.owned(piece);
  const at::Tensor memory = slots_.memory(state.slot);
  const int64_t bytes = c.spec.wire.bytes(c.layout(), mine);
  int64_t offset = plan_.result;
  std::vector<Transport::Message> receives, sends;
  for (size_t i = 0; i < c.members.size(); ++i) {
    const int peer = c.members[i];
    if (i == c.me) {
      state.rows.data.push_back(c.leaf(piece, mine));
      continue;
    }
    state.rows.data.push_back(
        memory.narrow(0, offset, bytes).view(c.spec.wire.dtype()));
    offset += plan_.message;
    receives.push_back({peer, state.rows.data.back()});
    sends.push_back({peer, c.leaf(piece, c.owned(piece, peer))});
  }
  state.posted = post_step(
      c.job,
      {Step::leaves, c.spec.level, static_cast<int64_t>(piece), state.turn++},
      std::move(receives),
      std::move(sends));
}

void RowExchange::post_coded(size_t piece, State& state) {
  const StageContext& c = context_;
  const Wire& wire = c.spec.wire;
  const Range mine = c.owned(piece);
  const at::Tensor memory = slots_.memory(state.slot);
  int64_t offset = plan_.result;
  const auto next = [&](Range tiles) {
    const at::Tensor message =
        memory.narrow(0, offset, wire.bytes(c.layout(), tiles));
    offset += plan_.message;
    return message;
  };
  std::vector<at::Tensor> coded;
  for (int64_t i = 0; i < plan_.coded; ++i) {
    const Range tiles = c.owned(piece, c.members[i]);
    coded.push_back(next(tiles));
    encode_tiles(
        c.layout(),
        tiles,
        c.leaf(piece, tiles),
        wire.view(c.layout(), tiles, coded.back()));
  }
  std::vector<Transport::Message> receives, sends;
  for (size_t i = 0; i < c.members.size(); ++i) {
    // Where nobody is an owner, all members get the same message.
    const at::Tensor& send = coded[c.spec.whole ? 0 : i];
    at::Tensor row = send;
    if (i != c.me) {
      row = next(mine);
      receives.push_back({c.members[i], row});
      sends.push_back({c.members[i], send});
    }
    const Coded view = wire.view(c.layout(), mine, row);
    state.rows.data.push_back(view.data);
    if (view.scales.defined()) {
      state.scales.push_back(view.scales);
    }
  }
  state.posted = post_step(
      c.job,
      {Step::leaves, c.spec.level, static_cast<int64_t>(piece), state.turn++},
      std::move(receives),
      std::move(sends));
}

const Rows& RowExchange::wait(size_t piece) {
  State& state = states_[piece];
  if (state.posted != nullptr) {
    const PhaseTimer timer(context_.job.outcome, Phase::exchange);
    context_.job.transport.wait(*state.posted);
    state.posted.reset();
    if (!state.scales.empty()) {
      state.rows.scales = at::stack(state.scales, 1);
      state.scales.clear();
    }
  }
  return state.rows;
}

bool RowExchange::drop_one(size_t keep, size_t horizon) {
  for (size_t k = states_.size(); k-- > 0;) {
    const bool here = has(k) && states_[k].posted == nullptr;
    if (here && k != keep && context_.pieces[k].ready >= horizon) {
      slots_.give_back(release(k));
      return true;
    }
  }
  return false;
}

size_t RowExchange::release(size_t piece) {
  State& state = states_[piece];
  const size_t slot = std::exchange(state.slot, kNone);
  state.rows = {};
  return slot;
}

} // namespace torch_sm3::distributed
