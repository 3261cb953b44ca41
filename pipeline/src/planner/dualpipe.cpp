// SPDX-License-Identifier: Apache-2.0
// dualpipe_v: two chunks per rank on a V, the forward of one paired with the
// backward of the other.
#include <planner/planning.h>

#include <array>
#include <deque>

namespace torch_sm3::pipeline {
namespace {

// The row of one rank as it grows; chunk 0 lies on the way down the ranks.
class PairedRow {
 public:
  PairedRow(const Sizes& sizes, uint32_t rank)
      : stages_{rank, 2 * sizes.ranks - 1 - rank} {
    row_.reserve(size_t{6} * sizes.microbatches);
  }

  void forward(uint32_t chunk, uint8_t flags = 0) {
    row_.push_back(
        compute(Op::kForward, stages_[chunk], forwards_[chunk]++, flags));
  }
  void backward(uint32_t chunk) {
    row_.push_back(compute(Op::kBackward, stages_[chunk], backwards_[chunk]++));
  }
  void pair(uint32_t forward_chunk) {
    forward(forward_chunk, kPaired);
    backward(1 - forward_chunk);
  }
  void input(uint32_t chunk) {
    const uint32_t i = backwards_[chunk]++;
    row_.push_back(compute(Op::kBackwardInput, stages_[chunk], i));
    owed_.push_back(compute(Op::kBackwardWeight, stages_[chunk], i));
  }
  void weight() {
    row_.push_back(owed_.front());
    owed_.pop_front();
  }
  bool owes() const {
    return !owed_.empty();
  }
  Row take() {
    return std::move(row_);
  }

 private:
  std::array<uint32_t, 2> stages_;
  std::array<uint32_t, 2> forwards_{};
  std::array<uint32_t, 2> backwards_{};
  std::deque<Action> owed_;
  Row row_;
};

Row dualpipe_row(const Sizes& sizes, uint32_t rank) {
  PairedRow row(sizes, rank);
  // Ranks below this one; the turn of the V is that far away.
  const uint32_t below = sizes.ranks - 1 - rank;
  const auto repeat = [](uint32_t times, const auto& step) {
    for (uint32_t k = 0; k < times; ++k) {
      step(k);
    }
  };
  // Warm-up: until the first microbatch is through the turn, then until it
  // comes back as a gradient.
  repeat(2 * below, [&](uint32_t) { row.forward(0); });
  repeat(rank + 1, [&](uint32_t) {
    row.forward(0);
    row.forward(1);
  });
  repeat(below, [&](uint32_t) {
    row.input(1);
    row.weight();
    row.forward(1);
  });
  // Steady state.
  repeat(sizes.microbatches - 2 * sizes.ranks + rank + 1, [&](uint32_t) {
    row.pair(0);
    row.pair(1);
  });
  // Cool-down: no forward of chunk 0 is left, then none of chunk 1, then only
  // weight gradients.
  repeat(below, [&](uint32_t) {
    row.backward(1);
    row.pair(1);
  });
  // From half way on the weight gradients wait: the upstream ranks need the
  // input gradients.
  repeat(rank + 1, [&](uint32_t k) {
    2 * k > rank ? row.input(1) : row.backward(1);
    2 * k + 1 > rank ? row.input(0) : row.backward(0);
  });
  repeat(below, [&](uint32_t) {
    row.weight();
    row.input(0);
  });
  while (row.owes()) {
    row.weight();
  }
  return row.take();
}

} // namespace

Rows dualpipe_rows(const Sizes& sizes, RankRange range) {
  Rows rows;
  for (uint32_t rank = range.first; rank < range.last; ++rank) {
    rows.push_back(dualpipe_row(sizes, rank));
  }
  return rows;
}

} // namespace torch_sm3::pipeline
