// SPDX-License-Identifier: Apache-2.0
#include <adasum_loopback.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace torch_sm3::distributed {
namespace {

using namespace std::chrono_literals;
using Transports = std::vector<std::unique_ptr<Transport>>;

// Runs one thread per transport; an error's text by rank, empty where none.
std::vector<std::string> on_all_ranks(
    Transports& transports,
    const std::function<void(Transport&)>& work) {
  std::vector<std::string> errors(transports.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < transports.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        work(*transports[rank]);
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

// Every rank sends [rank, step] to all others.
void swap_ranks(Transport& transport, int step) {
  at::Tensor all = at::zeros({transport.size(), 2});
  const at::Tensor own = at::zeros({2});
  own[0].fill_(transport.rank());
  own[1].fill_(step);
  std::vector<Transport::Message> receives, sends;
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer != transport.rank()) {
      receives.push_back({peer, all[peer]});
      sends.push_back({peer, own});
    }
  }
  transport.wait(*transport.post(receives, sends, step, "swap"));
  all[transport.rank()].copy_(own);
  EXPECT_TRUE(
      at::equal(all.select(1, 0), at::arange(transport.size(), all.options())));
  EXPECT_TRUE(
      at::equal(
          all.select(1, 1), at::full({transport.size()}, step, all.options())));
}

TEST(Loopback, SwapsBetweenAllRanksInEveryStep) {
  Transports transports = loopback_transports(5, 60s);
  expect_no_errors(on_all_ranks(transports, [](Transport& transport) {
    for (int step = 0; step < 50; ++step) {
      swap_ranks(transport, step);
    }
    EXPECT_EQ(transport.messages_sent(), 50 * 4);
    EXPECT_EQ(transport.bytes_sent(), 50 * 4 * 8);
  }));
}

TEST(Loopback, MatchesTagsWhateverTheOrder) {
  Transports transports = loopback_transports(2, 60s);
  expect_no_errors(on_all_ranks(transports, [](Transport& transport) {
    const int peer = 1 - transport.rank();
    const at::Tensor one = at::full({3}, 1.0), two = at::full({3}, 2.0);
    at::Tensor got_one = at::zeros({3}), got_two = at::zeros({3});
    std::unique_ptr<Transport::Posted> first, second;
    if (transport.rank() == 0) {
      first = transport.post({{peer, got_one}}, {{peer, one}}, 1, "one");
      second = transport.post({{peer, got_two}}, {{peer, two}}, 2, "two");
    } else {
      second = transport.post({{peer, got_two}}, {{peer, two}}, 2, "two");
      first = transport.post({{peer, got_one}}, {{peer, one}}, 1, "one");
    }
    transport.wait(*second);
    transport.wait(*first);
    EXPECT_TRUE(at::equal(got_one, one));
    EXPECT_TRUE(at::equal(got_two, two));
  }));
}

TEST(Loopback, AddsOverAllRanks) {
  Transports transports = loopback_transports(4, 60s);
  expect_no_errors(on_all_ranks(transports, [](Transport& transport) {
    for (int step = 1; step < 20; ++step) {
      at::Tensor x = at::full({7}, (transport.rank() + 1) * step);
      transport.sum(x, "sum");
      EXPECT_TRUE(at::equal(x, at::full({7}, 10 * step)));
    }
  }));
}

TEST(Loopback, OtherTagIsATimeout) {
  Transports transports = loopback_transports(2, 200ms);
  const auto errors = on_all_ranks(transports, [](Transport& transport) {
    const int peer = 1 - transport.rank();
    at::Tensor x = at::zeros({3});
    transport.wait(*transport.post({{peer, x}}, {}, transport.rank(), "step"));
  });
  EXPECT_EQ(
      errors[0],
      "step: expected rank 1 to send within 0.2 s, but got: no message [rank 0 "
      "of 2, group loopback]");
  EXPECT_NE(errors[1].find("rank 0 to send"), std::string::npos);
}

TEST(Loopback, OtherSizeIsAnErrorOnBothSides) {
  Transports transports = loopback_transports(2, 60s);
  const auto errors = on_all_ranks(transports, [](Transport& transport) {
    const int peer = 1 - transport.rank();
    at::Tensor x = at::zeros({3 + transport.rank()});
    transport.rank() == 0
        ? transport.wait(*transport.post({{peer, x}}, {}, 1, "s"))
        : transport.wait(*transport.post({}, {{peer, x}}, 1, "s"));
  });
  EXPECT_NE(
      errors[0].find("16 bytes where 12 were expected"), std::string::npos);
  EXPECT_NE(
      errors[1].find("16 bytes where 12 were expected"), std::string::npos);
}

TEST(Loopback, DeadPeerIsAnErrorAtOnce) {
  Transports transports = loopback_transports(3, 600s);
  transports[1].reset();
  Transports alive;
  alive.push_back(std::move(transports[0]));
  alive.push_back(std::move(transports[2]));
  const auto errors = on_all_ranks(alive, [](Transport& transport) {
    if (transport.rank() == 0) {
      at::Tensor x = at::zeros({3});
      transport.wait(*transport.post({{1, x}}, {}, 1, "s"));
    } else {
      at::Tensor x = at::zeros({3});
      transport.sum(x, "sum");
    }
  });
  EXPECT_NE(errors[0].find("rank 1 to send"), std::string::npos);
  EXPECT_NE(errors[0].find("a rank that is gone"), std::string::npos);
  EXPECT_NE(errors[1].find("all ranks to take part"), std::string::npos);
}

TEST(Loopback, InterruptEndsAWait) {
  Transports transports = loopback_transports(2, 600s);
  std::thread interrupter([&] {
    std::this_thread::sleep_for(50ms);
    transports[0]->interrupt();
  });
  at::Tensor x = at::zeros({3});
  const auto posted = transports[0]->post({{1, x}}, {}, 1, "step");
  EXPECT_THROW(transports[0]->wait(*posted), c10::Error);
  interrupter.join();
  EXPECT_THROW(transports[0]->post({}, {}, 2, "step"), c10::Error);
}

} // namespace
} // namespace torch_sm3::distributed
