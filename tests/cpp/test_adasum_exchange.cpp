// SPDX-License-Identifier: Apache-2.0
#include "adasum_loopback_ranks.h"

#include <adasum_collective_transport.h>
#include <adasum_staged_transport.h>
#include <adasum_worker.h>

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
