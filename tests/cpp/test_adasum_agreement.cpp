// SPDX-License-Identifier: Apache-2.0
#include "adasum_loopback_ranks.h"

#include <adasum_exchange.h>

#include <ATen/ops/ones.h>

namespace torch_sm3::distributed {
namespace {

// One request on each rank of three, changed by rank.
std::vector<std::string>
errors_of(const std::function<void(int rank, Request& request)>& change) {
  return on_all_ranks(
      loopback_transports(3, 60s),
      [&](int rank, std::unique_ptr<Transport> transport) {
        Exchange exchange(std::move(transport));
        Request request = request_for({at::ones({6})});
        change(rank, request);
        exchange.run(request);
      });
}

TEST(Header, NamesRanksAndLayerSizes) {
  expect_all(
      errors_of([](int rank, Request& request) {
        if (rank == 1) {
          request = request_for({at::ones({4}), at::ones({2})});
        }
      }),
      "op: bucket 7: expected the same call on all ranks, but got number of "
      "layers 1 on ranks 0 and 2 and 2 on rank 1; layer sizes (hash ");
}

TEST(Header, NamesElementsAndDtypes) {
  expect_all(
      errors_of([](int rank, Request& request) {
        if (rank == 2) {
          request = request_for({at::ones({7}, at::kHalf)});
        }
      }),
      "number of elements 6 on ranks 0 and 1 and 7 on rank 2; ");
  expect_all(
      errors_of([](int rank, Request& request) {
        if (rank == 2) {
          request = request_for({at::ones({6}, at::kHalf)});
        }
      }),
      "dtype Float on ranks 0 and 1 and Half on rank 2");
}

TEST(Header, NamesEveryOption) {
  const auto differs = [](const std::function<void(Plan&)>& change,
                          const std::string& part) {
    expect_all(
        errors_of([&](int rank, Request& request) {
          if (rank == 0) {
            request = request_for(request.tensors, change);
          }
        }),
        part);
  };
  differs(
      [](Plan& plan) { plan.rule.mode = Mode::psum; },
      "mode 'psum' on rank 0 and 'tree' on ranks 1 and 2");
  differs(
      [](Plan& plan) { plan.algorithm = Algorithm::gram; },
      "algorithm 'gram' on rank 0 and 'auto' on");
  differs(
      [](Plan& plan) { plan.rule.scale = 1.0 + 1e-15; },
      "scale 1.0000000000000011 on rank 0 and 1 on");
  differs(
      [](Plan& plan) { plan.rule.node_size = 2; },
      "node_size 2 on rank 0 and 0 on");
  differs(
      [](Plan& plan) { plan.rule.inner = Inner::adasum; },
      "inner 'adasum' on rank 0 and 'mean' on");
  differs(
      [](Plan& plan) { plan.means = {true}; },
      "weights or excluded layers (hash ");
  differs(
      [](Plan& plan) { plan.accumulate = Accumulate::kFloat32; },
      "accumulate_dtype 'float32' on rank 0");
  differs(
      [](Plan& plan) { plan.wire = at::kBFloat16; },
      "wire_dtype 'bfloat16' on rank 0 and 'none' on");
  differs(
      [](Plan& plan) { plan.scratch_bytes *= 2; },
      "scratch_bytes 134217728 on rank 0 and 67108864 on");
}

TEST(Header, NamesAWarmUpAndACallTooMany) {
  expect_all(
      errors_of([](int rank, Request& request) { request.mean = rank == 1; }),
      "warm-up 'no' on ranks 0 and 2 and 'yes' on rank 1");
  expect_all(
      on_all_ranks(
          loopback_transports(2, 60s),
          [](int rank, std::unique_ptr<Transport> transport) {
            Exchange exchange(std::move(transport));
            if (rank == 0) {
              exchange.swap(at::ones({6}), "swap");
            } else {
              exchange.run(request_for({at::ones({6})}));
            }
          }),
      "kind 'values' on rank 0 and 'bucket' on rank 1");
}

TEST(Header, ToldToRanksWhoseShardsAgree) {
  // Two replicas of two shards; the shards of the second replica disagree.
  Transports replicas[2] = {
      loopback_transports(2, 60s), loopback_transports(2, 60s)};
  Transports shards[2] = {
      loopback_transports(2, 60s), loopback_transports(2, 60s)};
  std::vector<std::string> errors(4);
  std::vector<std::thread> threads;
  for (int k = 0; k < 4; ++k) {
    threads.emplace_back([&, k] {
      const int replica = k / 2, shard = k % 2;
      Exchange exchange(
          std::move(replicas[shard][replica]),
          std::move(shards[replica][shard]));
      try {
        const size_t layers = replica == 1 && shard == 1 ? 2 : 1;
        exchange.run(
            request_for(std::vector<at::Tensor>(layers, at::ones({4}))));
      } catch (const c10::Error& error) {
        errors[k] = error.what_without_backtrace();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_NE(
      errors[0].find(
          "agreement of the shard group 'yes' on rank 0 and 'no' on rank 1"),
      std::string::npos)
      << errors[0];
  for (int k = 1; k < 4; ++k) {
    EXPECT_NE(
        errors[k].find("number of layers 1 on rank 0 and 2 on rank 1"),
        std::string::npos)
        << errors[k];
  }
}

TEST(Hash, NamesTheRankAndTheLayerOfAFlippedBit) {
  const auto errors = errors_of([](int, Request&) {});
  expect_no_errors(errors);
  expect_all(
      on_all_ranks(
          loopback_transports(3, 60s),
          [](int rank, std::unique_ptr<Transport> transport) {
            Exchange exchange(std::move(transport));
            Request request = request_for(
                {at::ones({6}), at::ones({4}), at::ones({5})},
                [](Plan& plan) { plan.names = {"a", "b", "c"}; });
            request.check = Check::hash;
            exchange.run(request);
            if (rank == 2) {
              exchange.damage(32);
            }
            exchange.run(request);
          }),
      "op: bucket 7: expected the same bits on all ranks, but got others on "
      "rank 2 in layer 'b' [");
}

TEST(Fingerprint, OtherCodeMayNotComputeTheSameResultTwice) {
  Transports transports = loopback_transports(2, 60s);
  Exchange exchange(std::move(transports[0]));
  Fingerprint stranger;
  stranger.alike_on_cpu = false;
  exchange.recognise(stranger, 0);
  Plan plan(Layout({6}));
  EXPECT_NE(exchange.algorithm(plan, c10::kCPU, 24, "op"), Algorithm::pair);
  EXPECT_EQ(exchange.algorithm(plan, c10::kCUDA, 24, "op"), Algorithm::pair);
  plan.algorithm = Algorithm::pair;
  EXPECT_THROW(exchange.algorithm(plan, c10::kCPU, 24, "op"), c10::ValueError);
}

TEST(Fingerprint, RanksPerMachineCountOnlyWhereTheyAreEqual) {
  for (const bool equal : {true, false}) {
    expect_no_errors(on_all_ranks(
        loopback_transports(3, 60s),
        [&](int rank, std::unique_ptr<Transport> transport) {
          Exchange exchange(std::move(transport));
          exchange.introduce(equal ? 2 : 1 + rank / 2, "introduction");
          EXPECT_EQ(exchange.fingerprint().local_world_size, equal ? 2 : 0);
          EXPECT_TRUE(exchange.fingerprint().alike_on_cpu);
        }));
  }
}

} // namespace
} // namespace torch_sm3::distributed
