// SPDX-License-Identifier: Apache-2.0
// Messages whose receiver wakes up when the connection is closed already: Gloo
// lets the wait throw, although the message came whole.
#include "pipeline_ranks.h"

#ifdef TORCH_SM3_TEST_GLOO

#include <torch_sm3/pipeline/transport.h>

#include <ATen/ops/full.h>

#include <atomic>
#include <latch>

namespace torch_sm3::pipeline {
namespace {

using Group = distributed::Group;

// The end of work whose first wait throws, as one that is woken late.
class LateWork : public c10d::Work {
 public:
  explicit LateWork(c10::intrusive_ptr<c10d::Work> work)
      : work_(std::move(work)) {}
  bool wait(std::chrono::milliseconds timeout) override {
    if (ended_) {
      return true;
    }
    // An aborted wait ends without the message, and the work goes on.
    ended_ = work_->wait(timeout);
    if (ended_) {
      throw std::runtime_error("connection closed by peer");
    }
    return false;
  }
  void abort() override {
    work_->abort();
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::atomic<bool> ended_{false};
};

// Work whose waits return once the gate is open, as those of a stopped process.
class HeldWork : public c10d::Work {
 public:
  HeldWork(c10::intrusive_ptr<c10d::Work> work, std::latch* gate)
      : work_(std::move(work)), gate_(gate) {}
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = work_->wait(timeout);
    gate_->wait();
    return done;
  }
  void abort() override {
    work_->abort();
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  std::latch* gate_;
};

// Receives are late, or held back until the gate opens if there is one.
class LateGroup : public c10d::ProcessGroup {
 public:
  explicit LateGroup(Group group, std::latch* gate = nullptr)
      : ProcessGroup(group->getRank(), group->getSize()),
        group_(std::move(group)),
        gate_(gate) {}
  c10::intrusive_ptr<c10d::Work>
  send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return group_->send(tensors, to, tag);
  }
  c10::intrusive_ptr<c10d::Work>
  recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    auto work = group_->recv(tensors, from, tag);
    if (gate_ != nullptr) {
      return c10::make_intrusive<HeldWork>(std::move(work), gate_);
    }
    return c10::make_intrusive<LateWork>(std::move(work));
  }

 private:
  Group group_;
  std::latch* gate_;
};

TEST(PipelineLateWaits, MessagesThatCameWholeAreTaken) {
  const auto errors = on_ranks(2, [](int rank, const Group& group) {
    TransportOptions options;
    options.timeout = 60;
    Transport links(c10::make_intrusive<LateGroup>(group), options);
    links.begin(1, false);
    const int64_t peer = 1 - rank;
    // Small ones travel with their header, large ones beside it; control
    // messages are received by a thread.
    for (const Channel channel : {Channel::kActivation, Channel::kControl}) {
      for (const int64_t size : {3, 1 << 18, 1 << 18, 5}) {
        Header header;
        header.source = static_cast<uint16_t>(rank);
        header.target = static_cast<uint16_t>(peer);
        Header expected;
        expected.source = header.target;
        expected.target = header.source;
        const int64_t ticket = links.receive(peer, channel, expected);
        EXPECT_EQ(
            links.send(peer, channel, header, {at::full({size}, rank)}, 60),
            Outcome::kDone);
        ASSERT_EQ(links.wait(ticket, 60), Outcome::kDone) << links.failure();
        const Message message = links.take(ticket);
        EXPECT_TRUE(message.tensors[0].equal(at::full({size}, peer)));
      }
    }
    links.close();
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

// What the others say before they leave counts, not that they left.
TEST(PipelineLateWaits, LastWordsAreHeard) {
  const auto errors = on_ranks(2, [](int rank, const Group& group) {
    TransportOptions options;
    options.timeout = 60;
    Transport links(c10::make_intrusive<LateGroup>(group), options);
    links.begin(1, false);
    if (rank == 1) {
      links.fail(structure_of({1, 1, 5, "1F5", "ValueError", "why"}));
    } else {
      Header expected;
      expected.source = 1;
      const int64_t ticket = links.receive(1, Channel::kControl, expected);
      EXPECT_EQ(links.wait(ticket, 60), Outcome::kLost);
    }
    EXPECT_NE(links.failure().find("ValueError"), std::string::npos)
        << links.failure();
    links.close();
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

// A hub that was stopped hears what a rank said that has left since, although
// another message came before, and names the same.
TEST(PipelineLateWaits, LastWordsAreHeardBehindAnotherMessage) {
  std::latch gate(1);
  std::vector<std::string> failures(2);
  const auto errors = on_ranks(2, [&](int rank, const Group& group) {
    TransportOptions options;
    options.timeout = rank == 1 ? 0.5 : 60;
    Transport links(
        rank == 1 ? group : Group(c10::make_intrusive<LateGroup>(group, &gate)),
        options);
    links.begin(1, false);
    if (rank == 1) {
      Header header;
      header.source = 1;
      EXPECT_EQ(
          links.send(0, Channel::kControl, header, {}, 60), Outcome::kDone);
      links.fail(structure_of({1, 1, 5, "1F5", "ValueError", "why"}));
      failures[1] = links.failure();
      links.close();
      gate.count_down();
      return;
    }
    Header expected;
    expected.source = 1;
    for (const Outcome outcome : {Outcome::kDone, Outcome::kLost}) {
      const int64_t ticket = links.receive(1, Channel::kControl, expected);
      EXPECT_EQ(links.wait(ticket, 20), outcome);
    }
    failures[0] = links.failure();
    links.close();
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
  EXPECT_NE(failures[0].find("rank 0 did not answer"), std::string::npos);
  EXPECT_EQ(failures[0], failures[1]);
}

} // namespace
} // namespace torch_sm3::pipeline

#endif
