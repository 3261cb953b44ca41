// SPDX-License-Identifier: Apache-2.0
#include <adasum_collective_transport.h>
#include <adasum_loopback.h>
#include <adasum_staged_transport.h>
#include <adasum_worker.h>

#include <torch_sm3/distributed.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cfenv>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace torch_sm3::distributed {
namespace {

using namespace std::chrono_literals;
using Transports = std::vector<std::unique_ptr<Transport>>;
using Work =
    std::function<void(int rank, std::unique_ptr<Transport> transport)>;

// Runs one thread per transport; an error's text by rank, empty where none.
std::vector<std::string> on_all_ranks(Transports transports, const Work& work) {
  std::vector<std::string> errors(transports.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < transports.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        work(static_cast<int>(rank), std::move(transports[rank]));
      } catch (const c10::Error& error) {
        errors[rank] = error.what_without_backtrace();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return errors;
}

void expect_no_errors(const std::vector<std::string>& errors) {
  for (const std::string& error : errors) {
    EXPECT_EQ(error, "");
  }
}

void expect_all(
    const std::vector<std::string>& errors,
    const std::string& part) {
  for (const std::string& error : errors) {
    EXPECT_NE(error.find(part), std::string::npos) << error;
  }
}

Request request_for(
    const std::vector<at::Tensor>& tensors,
    const std::function<void(Plan&)>& change = {}) {
  std::vector<int64_t> sizes;
  for (const at::Tensor& tensor : tensors) {
    sizes.push_back(reals_of(tensor));
  }
  Plan plan(Layout(std::move(sizes)));
  if (change) {
    change(plan);
  }
  Request request;
  request.plan = std::make_shared<const Plan>(std::move(plan));
  request.tensors = tensors;
  request.what = "op: bucket 7";
  return request;
}

at::Tensor expected(const at::Tensor& leaves) {
  const std::vector<c10::SymInt> sizes{c10::SymInt(leaves.size(1))};
  return adasum_combine(
      leaves, adasum_coefficients(adasum_gram(leaves, sizes)), sizes);
}

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
              exchange.damage(4 * 8);
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

TEST(Exchange, OneRankKeepsItsBits) {
  Exchange exchange(std::move(loopback_transports(1, 60s)[0]));
  const at::Tensor x = at::full({5}, std::numeric_limits<float>::quiet_NaN());
  x[0].fill_(-0.0);
  const at::Tensor before = x.clone().view(at::kInt);
  exchange.run(request_for({x}));
  EXPECT_TRUE(at::equal(x.view(at::kInt), before));
  const at::Tensor y = at::full({3}, 3.0);
  exchange.run(request_for({y}, [](Plan& plan) { plan.rule.scale = 0.1; }));
  EXPECT_TRUE(at::equal(y, at::full({3}, static_cast<float>(3.0 * 0.1))));
}

TEST(Exchange, WritesOutputsOfAnotherOrderAndDtype) {
  const at::Tensor leaves = at::randn({2, 12}).to(at::kHalf);
  expect_no_errors(on_all_ranks(
      loopback_transports(2, 60s),
      [&](int rank, std::unique_ptr<Transport> transport) {
        Exchange exchange(std::move(transport));
        const at::Tensor x = leaves[rank].clone().view({1, 3, 2, 2});
        Request request = request_for({x});
        const at::Tensor out =
            at::zeros({1, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
        request.outputs = {out};
        check_request(request, 2, "op");
        exchange.run(request);
        EXPECT_TRUE(at::equal(x.view({-1}), leaves[rank]));
        EXPECT_TRUE(
            at::equal(
                out.to(at::kHalf).contiguous().view({-1}), expected(leaves)));
      }));
}

TEST(Worker, WorksInOrderAndKeepsOutcomes) {
  const at::Tensor leaves = at::randn({2, 9});
  expect_no_errors(on_all_ranks(
      loopback_transports(2, 60s),
      [&](int rank, std::unique_ptr<Transport> transport) {
        Worker worker(std::make_unique<Exchange>(std::move(transport)));
        std::vector<int> order;
        std::vector<at::Tensor> tensors;
        for (int k = 0; k < 5; ++k) {
          tensors.push_back(leaves[rank].clone());
          Request request = request_for({tensors.back()});
          request.metrics = true;
          worker.submit(
              k,
              std::move(request),
              [&order, k](const std::exception_ptr& error) {
                EXPECT_EQ(error, nullptr);
                order.push_back(k);
              });
        }
        const at::Tensor all = worker.swap(at::full({2}, rank), "swap");
        EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4}));
        EXPECT_TRUE(at::equal(all.select(1, 0), at::arange(2, all.options())));
        for (const at::Tensor& tensor : tensors) {
          EXPECT_TRUE(at::equal(tensor, expected(leaves)));
        }
        EXPECT_TRUE(worker.outcome(1)->gram.defined());
        EXPECT_FALSE(worker.outcome(1).has_value());
        worker.forget(4);
        EXPECT_FALSE(worker.outcome(3).has_value());
        EXPECT_TRUE(worker.outcome(4).has_value());
      }));
}

TEST(Worker, ClosesWithQueuedWork) {
  Transports transports = loopback_transports(2, 600s);
  int failed = 0;
  {
    Worker worker(std::make_unique<Exchange>(std::move(transports[0])));
    for (int k = 0; k < 10; ++k) {
      worker.submit(
          k,
          request_for({at::ones({6})}),
          [&](const std::exception_ptr& error) {
            failed += error != nullptr ? 1 : 0;
          });
    }
    std::this_thread::sleep_for(20ms); // the first one waits for the other rank
  } // destruction closes
  EXPECT_EQ(failed, 10);
}

TEST(Worker, ClosesTwiceAndRefusesWorkAfterwards) {
  Transports transports = loopback_transports(2, 600s);
  Worker worker(std::make_unique<Exchange>(std::move(transports[0])));
  std::thread other([&] { worker.close(); });
  worker.close();
  other.join();
  worker.close();
  worker.drain();
  EXPECT_THROW(
      worker.submit(0, request_for({at::ones({6})}), [](auto&) {}), c10::Error);
  EXPECT_THROW(worker.swap(at::ones({1}), "swap"), c10::Error);
}

TEST(Worker, FailsAllAfterADeadPeer) {
  Transports transports = loopback_transports(2, 600s);
  transports[1].reset();
  Worker worker(std::make_unique<Exchange>(std::move(transports[0])));
  std::vector<std::string> errors;
  for (int k = 0; k < 3; ++k) {
    worker.submit(
        k, request_for({at::ones({6})}), [&](const std::exception_ptr& error) {
          try {
            std::rethrow_exception(error);
          } catch (const c10::DistBackendError& failure) {
            errors.push_back(failure.what_without_backtrace());
          }
        });
  }
  worker.drain();
  ASSERT_EQ(errors.size(), 3u);
  expect_all(
      errors,
      "op: bucket 7, header: expected rank 1 to send within 600 s, but got: a "
      "rank that is gone");
}

TEST(Worker, ComputesInTheEnvironmentOfWhoeverSubmits) {
  Worker worker(
      std::make_unique<Exchange>(std::move(loopback_transports(1, 60s)[0])));
  const auto scaled = [&](int64_t ticket) {
    // The product lies between two numbers of float32, nearer to the lower.
    const at::Tensor x = at::full({1}, 0.5 + std::ldexp(1.0, -24));
    worker.submit(
        ticket,
        request_for(
            {x},
            [](Plan& plan) { plan.rule.scale = 1.0 + std::ldexp(1.0, -25); }),
        [](auto&) {});
    worker.drain();
    return x.item<float>();
  };
  const float nearest = scaled(0);
  std::fesetround(FE_UPWARD);
  const float upward = scaled(1);
  std::fesetround(FE_TONEAREST);
  EXPECT_GT(upward, nearest);
  EXPECT_EQ(scaled(2), nearest);
}

TEST(Worker, WithoutAThreadDoesTheWorkAtOnce) {
  const at::Tensor leaves = at::randn({2, 9});
  expect_no_errors(on_all_ranks(
      loopback_transports(2, 60s, /*host_waits=*/false),
      [&](int rank, std::unique_ptr<Transport> transport) {
        Worker worker(
            std::make_unique<Exchange>(std::move(transport)),
            /*threaded=*/false);
        const at::Tensor x = leaves[rank].clone();
        bool done = false;
        worker.submit(
            0, request_for({x}), [&](const std::exception_ptr& error) {
              done = error == nullptr;
            });
        EXPECT_TRUE(done);
        EXPECT_TRUE(at::equal(x, expected(leaves)));
      }));
}

TEST(Staged, MovesTheSameBits) {
  const at::Tensor leaves = at::randn({3, 40000});
  expect_no_errors(on_all_ranks(
      loopback_transports(3, 60s),
      [&](int rank, std::unique_ptr<Transport> transport) {
        Exchange exchange(
            std::make_unique<StagedTransport>(
                std::move(transport), /*always=*/true));
        Request request = request_for({leaves[rank].clone()});
        request.check = Check::hash;
        exchange.run(request);
        EXPECT_TRUE(at::equal(request.tensors[0], expected(leaves)));
        Request mean = request_for({leaves[rank].clone()});
        mean.mean = true;
        exchange.run(mean);
        EXPECT_LT(
            (mean.tensors[0] - leaves.mean(0)).abs().max().item<double>(),
            1e-6);
      }));
}

// A backend with collectives only, as NCCL is, over threads.
class FakeBackend : public c10d::Backend {
 public:
  explicit FakeBackend(std::unique_ptr<Transport> messages)
      : c10d::Backend(messages->rank(), messages->size()),
        messages_(std::move(messages)) {}

  const std::string getBackendName() const override {
    return "fake";
  }
  c10::intrusive_ptr<c10d::Work> alltoall(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllToAllOptions&) override {
    EXPECT_EQ(outputs.size(), static_cast<size_t>(getSize()));
    std::vector<Transport::Message> receives, sends;
    for (int peer = 0; peer < getSize(); ++peer) {
      receives.push_back({peer, outputs[peer]});
      sends.push_back({peer, inputs[peer]});
    }
    messages_->wait(*messages_->post(receives, sends, 1, "alltoall"));
    return c10::make_intrusive<Finished>();
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceOptions&) override {
    messages_->sum(tensors[0], "allreduce");
    return c10::make_intrusive<Finished>();
  }

 private:
  struct Finished : c10d::Work {
    bool wait(std::chrono::milliseconds) override {
      return true;
    }
  };
  const std::unique_ptr<Transport> messages_;
};

TEST(Collective, MovesTheSameBits) {
  const at::Tensor leaves = at::randn({3, 40000});
  expect_no_errors(on_all_ranks(
      loopback_transports(3, 60s),
      [&](int rank, std::unique_ptr<Transport> transport) {
        auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, 3);
        group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
        group->setBackend(
            c10::kCPU,
            c10d::ProcessGroup::BackendType::CUSTOM,
            c10::make_intrusive<FakeBackend>(std::move(transport)));
        group->setGroupName("fake");
        Exchange exchange(
            std::make_unique<CollectiveTransport>(group, c10::kCPU, 60s));
        exchange.introduce(0, "introduction");
        Request request = request_for({leaves[rank].clone()});
        request.check = Check::hash;
        exchange.run(request);
        EXPECT_TRUE(at::equal(request.tensors[0], expected(leaves)));
        Request mean = request_for({leaves[rank].clone()});
        mean.mean = true;
        exchange.run(mean);
        EXPECT_LT(
            (mean.tensors[0] - leaves.mean(0)).abs().max().item<double>(),
            1e-6);
        exchange.interrupt();
        EXPECT_THROW(exchange.run(request), c10::Error);
      }));
}

} // namespace
} // namespace torch_sm3::distributed
