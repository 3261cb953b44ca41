// SPDX-License-Identifier: Apache-2.0
#include <adasum_algorithms.h>
#include <adasum_loopback.h>
#include <adasum_pieces.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch_sm3/distributed.h>

#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

namespace torch_sm3::distributed {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

struct Simulated {
  std::vector<at::Tensor> results; // by rank
  std::vector<Outcome> outcomes;
  int64_t scratch = 0; // of rank 0, in bytes
};

// All ranks of an algorithm in this process.
Simulated simulate(
    const Plan& plan,
    Algorithm algorithm,
    const at::Tensor& stack,
    bool host_waits = true) {
  const int ranks = static_cast<int>(stack.size(0));
  const at::Tensor rows = stack.clone();
  auto transports =
      loopback_transports(ranks, std::chrono::minutes(2), host_waits);
  Simulated simulated;
  simulated.outcomes.resize(ranks);
  std::vector<Scratch> scratch(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      run_algorithm(
          algorithm,
          {plan,
           rows[rank],
           rows[rank],
           *transports[rank],
           nullptr,
           scratch[rank],
           /*call=*/7,
           "test",
           &simulated.outcomes[rank]});
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (int rank = 0; rank < ranks; ++rank) {
    simulated.results.push_back(rows[rank]);
  }
  simulated.scratch = scratch[0].bytes();
  return simulated;
}

Plan plan_of(std::vector<int64_t> sizes, int64_t scratch_bytes = 64 * kMiB) {
  Plan plan{Layout(std::move(sizes))};
  plan.scratch_bytes = scratch_bytes;
  return plan;
}

at::Tensor
expected(const at::Tensor& stack, const std::vector<int64_t>& sizes) {
  std::vector<c10::SymInt> symbols(sizes.begin(), sizes.end());
  return adasum_combine(
      stack, adasum_coefficients(adasum_gram(stack, symbols), "tree"), symbols);
}

std::vector<int64_t> sizes_of_layers() {
  return {50000, 3, 0, 33000, 1};
}

at::Tensor leaves(int64_t ranks, c10::ScalarType dtype = at::kFloat) {
  int64_t elements = 0;
  for (const int64_t size : sizes_of_layers()) {
    elements += size;
  }
  return at::randn({ranks, elements}).to(dtype);
}

TEST(AdasumAlgorithms, GramHasTheBitsOfThePureOperators) {
  for (const int64_t ranks : {2, 3, 4, 7}) {
    const at::Tensor stack = leaves(ranks);
    const at::Tensor want = expected(stack, sizes_of_layers());
    for (const int64_t scratch : {kMiB, 64 * kMiB}) {
      for (const Algorithm algorithm : {Algorithm::gather, Algorithm::gram}) {
        const auto got =
            simulate(plan_of(sizes_of_layers(), scratch), algorithm, stack);
        for (const at::Tensor& result : got.results) {
          EXPECT_TRUE(at::equal(result, want));
        }
      }
    }
  }
}

TEST(AdasumAlgorithms, LevelsRoundOnceEach) {
  for (const Algorithm algorithm : {Algorithm::two_level, Algorithm::vhdd}) {
    for (const int64_t ranks : {4, 8, 16}) {
      const at::Tensor stack = leaves(ranks);
      const at::Tensor want = expected(stack, sizes_of_layers());
      const auto got = simulate(plan_of(sizes_of_layers()), algorithm, stack);
      for (const at::Tensor& result : got.results) {
        EXPECT_TRUE(at::equal(result, got.results[0]));
      }
      const double error = got.results[0].sub(want).norm().item<double>() /
                           want.norm().item<double>();
      EXPECT_LE(error, 2e-7 * std::log2(ranks));
    }
  }
}

TEST(AdasumAlgorithms, ScratchMemoryKeepsToItsCap) {
  const std::vector<int64_t> sizes = {1000000, 5, 700000};
  const at::Tensor stack = at::randn({4, 1700005});
  const at::Tensor want = expected(stack, sizes);
  for (const Algorithm algorithm :
       {Algorithm::gather,
        Algorithm::gram,
        Algorithm::two_level,
        Algorithm::vhdd}) {
    const auto got = simulate(plan_of(sizes, kMiB), algorithm, stack);
    EXPECT_LE(got.scratch, kMiB);
    EXPECT_TRUE(at::allclose(got.results[3], want, 1e-4, 1e-5));
  }
}

// The device path: no flag is looked at, every float64 layer is repeated.
TEST(AdasumAlgorithms, BlindHostsGetTheSameResult) {
  at::Tensor stack = leaves(4, at::kDouble);
  stack.narrow(1, 0, sizes_of_layers()[0]).mul_(1e-200).mul_(1e-100);
  for (const Algorithm algorithm :
       {Algorithm::gather,
        Algorithm::gram,
        Algorithm::two_level,
        Algorithm::vhdd}) {
    const Plan plan = plan_of(sizes_of_layers(), kMiB);
    const auto seeing = simulate(plan, algorithm, stack, true);
    const auto blind = simulate(plan, algorithm, stack, false);
    EXPECT_TRUE(at::equal(seeing.results[1], blind.results[1]));
    EXPECT_GT(blind.results[0][0].abs().item<double>(), 0.0);
  }
}

TEST(AdasumAlgorithms, MessagesAreThoseOfTheTable) {
  // Four ranks, one piece of eight whole tiles.
  const int64_t tile = 16384;
  const at::Tensor stack = at::randn({4, 8 * tile});
  const Plan plan = plan_of({8 * tile});
  const auto gram = simulate(plan, Algorithm::gram, stack);
  EXPECT_EQ(gram.outcomes[0].messages_sent, 3 * 3);
  EXPECT_EQ(
      gram.outcomes[0].bytes_sent,
      3 * (2 * tile * 4 * 2 + int64_t{2} * 10 * 8));
  const auto gather = simulate(plan, Algorithm::gather, stack);
  EXPECT_EQ(gather.outcomes[0].messages_sent, 3);
  EXPECT_EQ(gather.outcomes[0].bytes_sent, tile * 3 * 8 * 4);
  const auto vhdd = simulate(plan, Algorithm::vhdd, stack);
  // Halves, quarters, and back; states; 3 sums per layer 1 + 2 times.
  EXPECT_EQ(
      vhdd.outcomes[0].bytes_sent,
      tile * 2 * (4 + 2) * 4 + int64_t{3} * 8 + int64_t{3} * 4 * 8);
}

TEST(AdasumAlgorithms, PiecesSayWhenTheirLayersAreKnown) {
  const int64_t tile = 16384;
  const Layout layout({2 * tile, 0, 5 * tile, 10, 0});
  const auto pieces = cut_into_pieces(layout, {0, 5}, 2 * tile, false);
  ASSERT_EQ(pieces.size(), 4U);
  EXPECT_EQ(pieces[0].ready, 0U);
  EXPECT_EQ(pieces[0].ended, 2);
  EXPECT_EQ(pieces[1].ready, 3U);
  EXPECT_EQ(pieces[1].ended, 2);
  EXPECT_EQ(pieces[3].ended, 5);
  EXPECT_EQ(pieces[3].tiles.last, 8);
  const auto together = cut_into_pieces(layout, {0, 5}, 2 * tile, true);
  EXPECT_EQ(together[0].ready, 3U);
  EXPECT_EQ(together[2].ended, 0);
}

TEST(AdasumAlgorithms, RunsOfTwoLevelDivideTheRanks) {
  const Rule rule;
  EXPECT_EQ(ranks_per_run(rule, 64, 0), 8);
  EXPECT_EQ(ranks_per_run(rule, 24, 0), 4);
  EXPECT_EQ(ranks_per_run(rule, 24, 8), 8);
  EXPECT_EQ(ranks_per_run(rule, 24, 3), 4);
  EXPECT_EQ(ranks_per_run(rule, 6, 0), 2);
  EXPECT_EQ(ranks_per_run(rule, 7, 0), 1);
}

TEST(AdasumAlgorithms, UnlikeRanksDoNotComputeEverything) {
  Plan plan = plan_of({100});
  EXPECT_EQ(
      choose_algorithm(plan, 2, 0, /*alike=*/false, 400, "op"),
      Algorithm::gram);
  plan.algorithm = Algorithm::pair;
  EXPECT_THROW(
      choose_algorithm(plan, 2, 0, /*alike=*/false, 400, "op"),
      c10::ValueError);
}

} // namespace
} // namespace torch_sm3::distributed
