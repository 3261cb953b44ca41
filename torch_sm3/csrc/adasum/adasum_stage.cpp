// SPDX-License-Identifier: Apache-2.0
#include "adasum_stage.h"

#include "adasum_return.h"
#include "adasum_rows.h"
#include "adasum_second_pass.h"
#include "adasum_states.h"
#include "adasum_sums.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

namespace torch_sm3::distributed {
namespace {

// Pieces that travel while one is computed with.
constexpr size_t kAhead = 2;
// Pieces on their way back while one is combined.
constexpr size_t kReturning = 3;

class StageRun {
 public:
  StageRun(
      const StageContext& context,
      Range layers,
      const at::Tensor& scratch,
      StageResult* result)
      : context_(context),
        layers_(layers),
        result_(result),
        slots_(scratch, slot_bytes(context)),
        rows_(context, slots_),
        returns_(context, slots_),
        // One slot is left to the piece that is computed with, one to a piece
        // that waits for the end of a layer.
        ahead_(slots_.count() < 2 ? 0 : std::min(kAhead, slots_.count() - 2)),
        known_(layers.first) {}

  void run();

 private:
  void post_states();
  void make_room(size_t piece);
  void look_ahead(size_t piece);
  const Rows& fetch(size_t piece);
  void compute_dots(size_t piece);
  void settle(size_t piece);
  void settle_layers(Range layers, size_t piece);
  void combine(size_t piece);

  at::Tensor of(const at::Tensor& all, Range layers) const {
    return all.defined() ? all.narrow(0, layers.first, layers.size()) : all;
  }

  const StageContext& context_;
  const Range layers_;
  StageResult* const result_;
  Slots slots_;
  RowExchange rows_;
  Returns returns_;
  at::Tensor states_; // float64 [layers, members, 3], or undefined
  std::unique_ptr<Transport::Posted> posted_states_;
  std::vector<at::Tensor> received_states_;
  at::Tensor shifts_;              // int32 [L, members], or undefined
  std::vector<TileValues> shared_; // of pieces computed and not settled
  size_t settled_ = 0;             // pieces
  size_t combined_ = 0;            // pieces
  const size_t ahead_;
  int64_t known_; // layers before this one have coefficients
};

void StageRun::run() {
  const size_t count = context_.pieces.size();
  post_states();
  for (size_t k = 0; k < count; ++k) {
    look_ahead(k);
    compute_dots(k);
    // The piece before: its inner products travelled in the meantime.
    while (settled_ < k) {
      settle(settled_);
    }
  }
  while (settled_ < count) {
    settle(settled_);
  }
  if (known_ < layers_.last) { // there are only empty ones
    settle_layers({known_, layers_.last}, 0);
  }
  returns_.advance(0);
}

// What the members' leaves are as nodes of earlier levels.
void StageRun::post_states() {
  const at::Tensor own = of(context_.spec.carried, layers_);
  if (!own.defined()) {
    return;
  }
  std::vector<Transport::Message> receives, sends;
  for (size_t i = 0; i < context_.members.size(); ++i) {
    received_states_.push_back(
        i == context_.me ? own : at::empty(own.sizes(), own.options()));
    if (i != context_.me) {
      const int peer = context_.members[i];
      receives.push_back({peer, received_states_.back().view({-1})});
      sends.push_back({peer, own.view({-1})});
    }
  }
  posted_states_ = post_step(
      context_.job,
      {Step::carried, context_.spec.level, layers_.first},
      std::move(receives),
      std::move(sends));
}

// A slot for the next piece: by settling what can be, else by dropping leaves
// that will be exchanged once more.
void StageRun::make_room(size_t piece) {
  while (!slots_.any_free() && settled_ < shared_.size()) {
    settle(settled_);
  }
  if (!slots_.any_free()) {
    returns_.advance(0);
  }
  if (!slots_.any_free()) {
    rows_.drop_one(piece, /*horizon=*/0);
  }
  TORCH_INTERNAL_ASSERT(slots_.any_free());
}

void StageRun::look_ahead(size_t piece) {
  if (!rows_.has(piece)) {
    make_room(piece);
    rows_.post(piece);
  }
  const size_t last = std::min(piece + ahead_ + 1, context_.pieces.size());
  for (size_t next = piece + 1; next < last; ++next) {
    // Only layers that last long give way to what comes later.
    if (!rows_.has(next) &&
        (slots_.any_free() || rows_.drop_one(piece, next + 2))) {
      rows_.post(next);
    }
  }
}

const Rows& StageRun::fetch(size_t piece) {
  if (!rows_.has(piece)) {
    make_room(piece);
    rows_.post(piece);
  }
  return rows_.wait(piece);
}

void StageRun::compute_dots(size_t piece) {
  const Rows& rows = rows_.wait(piece);
  at::Tensor own;
  {
    const PhaseTimer timer(context_.job.outcome, Phase::dots);
    own = dots_of_tiles(
        context_.layout(),
        context_.owned(piece),
        rows,
        context_.job.plan.accumulate);
  }
  shared_.push_back(share_tiles(
      context_,
      {Step::dots, context_.spec.level, static_cast<int64_t>(piece)},
      context_.pieces[piece].tiles,
      own));
}

// Adds a piece's inner products to its layers, computes the coefficients of
// those that have ended, and combines all pieces of which all layers are known.
void StageRun::settle(size_t piece) {
  ++settled_;
  wait_for(context_, shared_[piece]);
  {
    const PhaseTimer timer(context_.job.outcome, Phase::dots);
    add_to_layers(context_.layout(), shared_[piece], result_->gram);
  }
  shared_[piece] = {};
  if (context_.pieces[piece].ended > known_) {
    settle_layers({known_, context_.pieces[piece].ended}, piece);
  }
  for (; combined_ < context_.pieces.size() &&
         context_.pieces[combined_].ready <= piece;
       ++combined_) {
    combine(combined_);
  }
}

void StageRun::settle_layers(Range layers, size_t piece) {
  known_ = layers.last;
  const Plan& plan = context_.job.plan;
  reduce_layers(context_, Reduction::sum, 0, of(result_->gram, layers));
  const bool limited = plan.accumulate == Accumulate::kFloat32 ||
                       context_.job.leaf.scalar_type() == at::kDouble;
  at::Tensor shifts;
  if (limited && !context_.pieces.empty()) {
    const at::Tensor found = at::zeros(
        result_->coefficients.sizes(),
        result_->coefficients.options().dtype(at::kInt));
    const auto end = static_cast<int64_t>(piece) + 1;
    if (second_pass(
            context_,
            layers,
            {static_cast<int64_t>(combined_), end},
            end,
            [this](size_t k) -> const Rows& { return fetch(k); },
            result_->gram,
            found)) {
      shifts = of(found, layers);
      if (!shifts_.defined()) {
        shifts_ = at::zeros(found.sizes(), found.options());
      }
      of(shifts_, layers).copy_(shifts);
    }
  }
  if (posted_states_ != nullptr) {
    context_.job.transport.wait(*posted_states_);
    posted_states_.reset();
  }
  if (!received_states_.empty() && !states_.defined()) {
    states_ = at::stack(received_states_, 1);
  }
  const PhaseTimer timer(context_.job.outcome, Phase::coefficients);
  const Range here{layers.first - layers_.first, layers.last - layers_.first};
  const at::Tensor gram = of(result_->gram, layers);
  const at::Tensor means = of(context_.spec.means, layers);
  const Rule& rule = context_.spec.rule;
  at::Tensor states = of(states_, here);
  if (states.defined()) {
    states = resolved_states(states, gram, rule, means, shifts);
  }
  const Coefficients c =
      coefficients_of_layers(gram, rule, means, shifts, states);
  of(result_->coefficients, layers).copy_(c.values);
  of(result_->report, layers).copy_(c.report);
  if (!context_.spec.last) {
    of(result_->carried, layers)
        .copy_(states_with_means(c.roots, gram, rule, means, shifts));
  }
}

void StageRun::combine(size_t piece) {
  const Rows& rows = fetch(piece);
  const size_t last = std::min(piece + ahead_ + 1, settled_);
  for (size_t next = piece + 1; next < last; ++next) {
    if (!rows_.has(next) && slots_.any_free()) {
      rows_.post(next);
    }
  }
  const StageSpec& spec = context_.spec;
  const Range own = context_.owned(piece);
  const at::Tensor out = context_.result(piece, own);
  const size_t slot = rows_.slot(piece);
  {
    const PhaseTimer timer(context_.job.outcome, Phase::combine);
    const Layout& layout = context_.layout();
    const Rows scaled = shifts_.defined()
                            ? rows_within(layout, rows, own.first, own, shifts_)
                            : rows;
    if (spec.last && spec.return_wire.coded()) {
      const int64_t bytes = spec.return_wire.bytes(layout, own);
      const Coded coded = spec.return_wire.view(
          layout, own, slots_.memory(slot).narrow(0, 0, bytes));
      combine_coded(layout, own, scaled, result_->coefficients, coded);
      decode_tiles(layout, own, coded, out);
    } else {
      combine_tiles(layout, own, scaled, result_->coefficients, out);
    }
  }
  rows_.release(piece);
  if (!spec.last) {
    slots_.give_back(slot);
    return;
  }
  returns_.post(piece, slot);
  returns_.advance(kReturning);
}

} // namespace

StageContext make_context(
    const Job& job,
    const Grid& grid,
    const StageSpec& spec,
    const std::vector<Piece>& pieces) {
  return {
      job,
      grid,
      spec,
      pieces,
      grid.members(spec.level),
      static_cast<size_t>(grid.digit(spec.level))};
}

void run_stage(
    const StageContext& context,
    Range layers,
    const at::Tensor& scratch,
    StageResult* result) {
  StageRun(context, layers, scratch, result).run();
}

} // namespace torch_sm3::distributed
