// SPDX-License-Identifier: Apache-2.0
// Two ranks, here two threads, that hold the halves of flattened tensors.
#include <sm3_face_helpers.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <barrier>
#include <limits>
#include <thread>

namespace torch_sm3::optim {
namespace {

// What the ranks have in common.
struct Meeting {
  std::barrier<> barrier{2};
  at::Tensor given[2];
};

class Done : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    return true;
  }
};

// The maximum over both ranks, and nothing else.
class Pair : public c10d::ProcessGroup {
 public:
  Pair(Meeting& meeting, int rank) : ProcessGroup(rank, 2), meeting_(meeting) {}

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions& options) override {
    EXPECT_TRUE(options.reduceOp == c10d::ReduceOp::MAX);
    meeting_.given[rank_] = tensors[0].clone();
    meeting_.barrier.arrive_and_wait();
    tensors[0].copy_(at::maximum(meeting_.given[0], meeting_.given[1]));
    meeting_.barrier.arrive_and_wait();
    ++calls;
    return c10::make_intrusive<Done>();
  }

  int calls = 0;

 private:
  Meeting& meeting_;
};

constexpr int64_t kRows = 5;
constexpr int64_t kColumns = 6;
constexpr int64_t kCut = 17; // within a row

struct Rank {
  at::Tensor piece;
  c10::intrusive_ptr<Pair> group;
  std::unique_ptr<SM3> optimizer;
};

struct Ranks {
  Meeting meeting;
  Rank ranks[2];

  Ranks(const at::Tensor& whole, const SM3Options& options) {
    const at::Tensor flat = whole.detach().reshape(-1);
    for (const int r : {0, 1}) {
      Rank& rank = ranks[r];
      const int64_t start = r == 0 ? 0 : kCut;
      rank.piece =
          leaf(flat.narrow(0, start, r == 0 ? kCut : flat.numel() - kCut));
      rank.group = c10::make_intrusive<Pair>(meeting, r);
      rank.optimizer =
          std::make_unique<SM3>(std::vector<at::Tensor>{rank.piece}, options);
      rank.optimizer->set_shape_hint(
          rank.piece, {kRows, kColumns}, start, rank.group);
    }
  }

  // Gives each rank its part of a gradient, or none.
  void step(const at::Tensor& grad, bool first, bool second) {
    const at::Tensor flat = grad.reshape(-1);
    const bool has[2] = {first, second};
    std::vector<std::thread> threads;
    for (const int r : {0, 1}) {
      const int64_t count = ranks[r].piece.numel();
      ranks[r].piece.mutable_grad() =
          has[r] ? flat.narrow(0, r == 0 ? 0 : kCut, count).clone()
                 : at::Tensor();
      threads.emplace_back([this, r] { ranks[r].optimizer->step(); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }

  at::Tensor whole() const {
    return at::cat({ranks[0].piece.detach(), ranks[1].piece.detach()})
        .reshape({kRows, kColumns});
  }
};

void expect_the_bits_of_the_whole(const SM3Options& options) {
  at::manual_seed(3);
  const auto params = leaves({{kRows, kColumns}});
  SM3 optimizer(params, options);
  Ranks two(params[0], options);
  for (uint64_t step = 0; step < 5; ++step) {
    set_grads(params, step);
    optimizer.step();
    two.step(params[0].grad(), true, true);
    EXPECT_TRUE(two.whole().equal(params[0])) << "step " << step;
    for (Rank& rank : two.ranks) {
      expect_equal(
          state_of(*rank.optimizer, rank.piece).accumulators(),
          state_of(optimizer, params[0]).accumulators());
    }
  }
}

TEST(SM3Pieces, test_sm3_row_26_halves_have_the_bits_of_the_whole) {
  expect_the_bits_of_the_whole(SM3Options());
  expect_the_bits_of_the_whole(SM3Options().beta2(0.5).momentum(0.9));
  expect_the_bits_of_the_whole(SM3Options().beta2(0.5).compat("enealor"));
}

TEST(SM3Pieces, HalvesHaveTheBitsOfTheWholeInVariantI) {
  expect_the_bits_of_the_whole(SM3Options().variant("I"));
  expect_the_bits_of_the_whole(SM3Options().variant("I").beta2(0.5));
  expect_the_bits_of_the_whole(
      SM3Options().variant("I").beta2(0.5).compat("enealor"));
}

TEST(SM3Pieces, ARankWithoutAGradientStaysInStep) {
  for (const char* variant : {"I", "II"}) {
    at::manual_seed(3);
    const auto params = leaves({{kRows, kColumns}});
    SM3 optimizer(params, SM3Options().variant(variant));
    Ranks two(params[0], SM3Options().variant(variant));
    set_grads(params, 1);
    const at::Tensor grad = params[0].grad().clone();
    // For the whole, no gradient is one of zeros.
    params[0].mutable_grad().reshape(-1).narrow(0, kCut, 30 - kCut).zero_();
    optimizer.step();
    two.step(grad, true, false);
    EXPECT_TRUE(two.whole().equal(params[0])) << variant;
    for (Rank& rank : two.ranks) {
      expect_equal(
          state_of(*rank.optimizer, rank.piece).accumulators(),
          state_of(optimizer, params[0]).accumulators());
    }
  }
}

TEST(SM3Pieces, AllRanksSkipWhatOneMustSkip) {
  for (const char* variant : {"I", "II"}) {
    at::manual_seed(3);
    const auto params = leaves({{kRows, kColumns}});
    Ranks two(params[0], SM3Options().variant(variant).skip_nonfinite(true));
    set_grads(params, 1);
    two.step(params[0].grad(), true, true);
    const at::Tensor before = two.whole();
    const int calls = two.ranks[0].group->calls;
    params[0].mutable_grad()[4][5] = std::numeric_limits<float>::quiet_NaN();
    two.step(params[0].grad(), true, true);
    EXPECT_TRUE(two.whole().equal(before));
    EXPECT_EQ(two.ranks[0].group->calls, 2 * calls);
    for (Rank& rank : two.ranks) {
      EXPECT_EQ(rank.optimizer->skipped_steps(), 1);
      EXPECT_EQ(
          state_of(*rank.optimizer, rank.piece).step().item<int64_t>(), 1);
    }
  }
}

} // namespace
} // namespace torch_sm3::optim
