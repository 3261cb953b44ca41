// SPDX-License-Identifier: Apache-2.0
#include "adasum_return.h"

#include <utility>

namespace torch_sm3::distributed {

Returns::Returns(const StageContext& context, Slots& slots)
    : context_(context),
      slots_(slots),
      plan_(context),
      coded_(context.spec.return_wire.coded()) {}

void Returns::post(size_t piece, size_t slot) {
  const PhaseTimer timer(context_.job.outcome, Phase::return_);
  if (!coded_) {
    slots_.give_back(slot);
  }
  // Where nobody is an owner, all members of this level have the result.
  const int level = context_.spec.level - (context_.spec.whole ? 1 : 0);
  if (level < 0) {
    if (coded_) {
      slots_.give_back(slot);
    }
    return;
  }
  pending_.push_back({piece, slot, level, {}, nullptr});
  post_level(pending_.back());
}

void Returns::advance(size_t pending) {
  const PhaseTimer timer(context_.job.outcome, Phase::return_);
  while (pending_.size() > pending) {
    Pending next = std::move(pending_.front());
    pending_.pop_front();
    finish_level(next);
    if (--next.level >= 0) {
      post_level(next);
      pending_.push_back(std::move(next));
    } else if (coded_) {
      slots_.give_back(next.slot);
    }
  }
}

Range Returns::part(const Pending& pending, int rank) const {
  return context_.grid.owned(
      context_.pieces[pending.piece].tiles, rank, pending.level + 1);
}

void Returns::post_level(Pending& pending) {
  if (coded_) {
    post_coded(pending);
    return;
  }
  const int rank = context_.grid.rank();
  const at::Tensor own = context_.result(pending.piece, part(pending, rank));
  std::vector<Transport::Message> receives, sends;
  for (const int peer : context_.grid.members(pending.level)) {
    if (peer != rank) {
      receives.push_back(
          {peer, context_.result(pending.piece, part(pending, peer))});
      sends.push_back({peer, own});
    }
  }
  pending.posted = post_step(
      context_.job,
      {Step::return_, pending.level, static_cast<int64_t>(pending.piece)},
      std::move(receives),
      std::move(sends));
}

void Returns::post_coded(Pending& pending) {
  const Layout& layout = context_.layout();
  const Wire& wire = context_.spec.return_wire;
  const at::Tensor memory = slots_.memory(pending.slot);
  const bool first = pending.level == context_.spec.level;
  // The own result of the first step stays where it is; what comes later is
  // found again exactly by coding what was decoded.
  int64_t offset = first ? plan_.result : 0;
  const auto next = [&](Range tiles) {
    const int64_t bytes = wire.bytes(layout, tiles);
    const at::Tensor message = memory.narrow(0, offset, bytes);
    offset += aligned(bytes);
    return message;
  };
  const int rank = context_.grid.rank();
  const Range mine = part(pending, rank);
  at::Tensor own;
  if (first) {
    own = memory.narrow(0, 0, wire.bytes(layout, mine));
  } else {
    own = next(mine);
    encode_tiles(
        layout,
        mine,
        context_.result(pending.piece, mine),
        wire.view(layout, mine, own));
  }
  std::vector<Transport::Message> receives, sends;
  pending.messages.clear();
  for (const int peer : context_.grid.members(pending.level)) {
    pending.messages.push_back(peer == rank ? own : next(part(pending, peer)));
    if (peer != rank) {
      receives.push_back({peer, pending.messages.back()});
      sends.push_back({peer, own});
    }
  }
  pending.posted = post_step(
      context_.job,
      {Step::return_, pending.level, static_cast<int64_t>(pending.piece)},
      std::move(receives),
      std::move(sends));
}

void Returns::finish_level(Pending& pending) {
  context_.job.transport.wait(*pending.posted);
  if (!coded_) {
    return;
  }
  const Layout& layout = context_.layout();
  const std::vector<int> members = context_.grid.members(pending.level);
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] != context_.grid.rank()) {
      const Range tiles = part(pending, members[i]);
      decode_tiles(
          layout,
          tiles,
          context_.spec.return_wire.view(layout, tiles, pending.messages[i]),
          context_.result(pending.piece, tiles));
    }
  }
}

} // namespace torch_sm3::distributed
