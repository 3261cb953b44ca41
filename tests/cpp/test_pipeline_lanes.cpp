// SPDX-License-Identifier: Apache-2.0
// Payload of a device: one communicator per directed link, opened up front, and
// streams in place of waits.
#include "pipeline_ranks.h"

#ifndef TORCH_SM3_TEST_GLOO

#include <gtest/gtest.h>

TEST(PipelineLanes, NeedsTheHeadersOfGloo) {
  GTEST_SKIP() << "no gloo/context.h; type: apt-get install libgloo-dev";
}

#else

#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/transport.h>
#include <transport/lanes.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace torch_sm3::pipeline {
namespace {

using Links = std::vector<Lanes::Link>;

Lane::Group pair_group(
    const c10::intrusive_ptr<c10d::Store>& store,
    int64_t rank,
    int64_t from,
    int64_t to) {
  return distributed::make_group(
      c10::make_intrusive<c10d::PrefixStore>(c10::str(from, ">", to), store),
      rank == from ? 0 : 1,
      2,
      std::chrono::seconds(120));
}

// The directed links between neighbours of a schedule.
Links links_of(const Schedule& schedule) {
  Links links;
  for (uint32_t stage = 0; stage + 1 < schedule.stages; ++stage) {
    const int64_t a = schedule.placement[stage];
    const int64_t b = schedule.placement[stage + 1];
    if (a != b) {
      links.emplace_back(a, b);
      links.emplace_back(b, a);
    }
  }
  return links;
}

// p = 4, v = 2: the ring's ranks use their links in unlike orders at first.
TEST(PipelineLanes, pipeline_row_18_links_are_opened_up_front) {
  PlanOptions options{"interleaved", 4, 4};
  options.chunks = 2;
  const Links links = links_of(plan(options));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Links> opened(4);
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      Links given = links;
      // Whatever the order in which a rank comes to know them.
      std::rotate(given.begin(), given.begin() + 3 * rank, given.end());
      const auto open = [&](int64_t from, int64_t to) {
        opened[static_cast<size_t>(rank)].emplace_back(from, to);
        return pair_group(store, rank, from, to);
      };
      Lanes lanes(rank, given, open, c10::Device(c10::kCPU), 0);
      // Each rank uses its links in an order of its own.
      const int64_t next = (rank + 1) % 4;
      const int64_t before = (rank + 3) % 4;
      const at::Tensor own = at::full({5}, rank, at::kInt);
      std::vector<Lane::Arrival> arrivals(2);
      const auto ask = [&](size_t which) {
        arrivals[which] = lanes.from(which == 0 ? before : next)
                              .receive(
                                  {{static_cast<int8_t>(at::kInt), false, {5}}},
                                  lanes.device());
      };
      if (rank % 2 == 0) {
        lanes.to(next).send({own});
        lanes.to(before).send({own + 10});
        ask(1);
        ask(0);
      } else {
        ask(0);
        lanes.to(before).send({own + 10});
        ask(1);
        lanes.to(next).send({own});
      }
      for (size_t which : {0u, 1u}) {
        const int64_t peer = which == 0 ? before : next;
        lanes.from(peer).join(arrivals[which]);
        EXPECT_EQ(
            arrivals[which].tensors[0][4].item<int64_t>(),
            which == 0 ? peer : peer + 10);
      }
      lanes.close(std::chrono::seconds(60));
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (int64_t rank = 0; rank < 4; ++rank) {
    Links own;
    std::copy_if(
        links.begin(), links.end(), std::back_inserter(own), [&](auto link) {
          return link.first == rank || link.second == rank;
        });
    std::sort(own.begin(), own.end());
    own.erase(std::unique(own.begin(), own.end()), own.end());
    // The one order of all ranks, each directed link once.
    EXPECT_EQ(opened[static_cast<size_t>(rank)], own);
  }
}

using Log = std::vector<std::string>;

class FakeWork : public c10d::Work {
 public:
  explicit FakeWork(Log* log) : log_(log) {}
  bool wait(std::chrono::milliseconds) override {
    log_->push_back("the host waits");
    return true;
  }
  void synchronize() override {
    log_->push_back("the stream waits");
  }

 private:
  Log* log_;
};

class FakeGroup : public c10d::ProcessGroup {
 public:
  explicit FakeGroup(Log* log) : ProcessGroup(0, 2), log_(log) {}
  c10::intrusive_ptr<c10d::Work>
  send(std::vector<at::Tensor>& tensors, int, int) override {
    log_->push_back(c10::str("send ", tensors[0].nbytes()));
    return c10::make_intrusive<FakeWork>(log_);
  }
  c10::intrusive_ptr<c10d::Work>
  recv(std::vector<at::Tensor>& tensors, int, int) override {
    log_->push_back(c10::str("recv ", tensors[0].nbytes()));
    return c10::make_intrusive<FakeWork>(log_);
  }

 private:
  Log* log_;
};

class FakeStream : public LaneStream {
 public:
  FakeStream(Log* log, const bool* passed) : log_(log), passed_(passed) {}
  void follow_caller() override {
    log_->push_back("follow");
  }
  Mark run(const std::function<void()>& enqueue) override {
    log_->push_back("(");
    enqueue();
    log_->push_back(")");
    return {};
  }
  void join(const Mark&) override {
    log_->push_back("join");
  }
  void lend(const at::Tensor& tensor) override {
    log_->push_back(c10::str("lend ", tensor.nbytes()));
  }
  void keep(const at::Tensor& tensor) override {
    log_->push_back(c10::str("keep ", tensor.nbytes()));
  }
  bool passed(const Mark&) override {
    return *passed_;
  }

 private:
  Log* log_;
  const bool* passed_;
};

at::Tensor on_meta(int64_t size) {
  return at::empty({size}, at::TensorOptions(at::kDouble).device(c10::kMeta));
}

// A device without memory: what matters is who waits for whom.
TEST(PipelineLanes, StreamsWaitAndTheHostDoesNot) {
  Log log;
  bool passed = false;
  {
    Lane lane(
        c10::make_intrusive<FakeGroup>(&log),
        1,
        std::make_unique<FakeStream>(&log, &passed));
    lane.send({on_meta(3), on_meta(0)});
    EXPECT_EQ(log, (Log{"follow", "(", "send 24", "the stream waits", ")"}));
    for (int i = 0; i < 40; ++i) {
      lane.send({on_meta(1)});
    }
    EXPECT_EQ(std::count(log.begin(), log.end(), "the host waits"), 0);
    EXPECT_EQ(lane.pending(), 41u) << "kept until they have left";
    passed = true;
    EXPECT_EQ(lane.pending(), 0u);
    passed = false;
    log.clear();
    const auto type = static_cast<int8_t>(at::kDouble);
    const Lane::Arrival arrival = lane.receive(
        {{type, false, {2, 2}}, {type, true, {0}}}, c10::Device(c10::kMeta));
    // The wait is one of the lane's stream: it stands inside.
    EXPECT_EQ(log, (Log{"(", "recv 32", "the stream waits", ")"}));
    EXPECT_EQ(arrival.tensors[1].sizes(), (std::vector<int64_t>{0}));
    log.clear();
    lane.join(arrival);
    EXPECT_EQ(log, (Log{"join", "lend 32", "lend 0"}));
    lane.send({on_meta(2)});
    log.clear();
    lane.close(std::chrono::seconds(1));
  }
  EXPECT_EQ(log, (Log{"keep 16"})) << "what is under way outlives its lane";
}

// Whole messages of a device: the host waits for headers and for nothing else.
TEST(PipelineLanes, HeadersTravelByGlooAndPayloadByStreams) {
  std::vector<Log> logs(2);
  const auto errors = on_ranks(2, [&](int rank, const auto& group) {
    Log& log = logs[static_cast<size_t>(rank)];
    const bool passed = false;
    const auto lanes = std::make_shared<Lanes>(
        rank,
        Links{{0, 1}, {1, 0}},
        [&](int64_t, int64_t) { return c10::make_intrusive<FakeGroup>(&log); },
        c10::Device(c10::kMeta),
        0,
        [&](c10::Device) {
          return std::make_unique<FakeStream>(&log, &passed);
        });
    log.clear(); // of the opening
    Transport transport(group, {60.0, 1, 1, {0, 1}, {}}, lanes);
    transport.begin(1, false);
    Header header;
    header.source = 0;
    header.target = 1;
    header.structure = "ttt";
    const at::Tensor host = at::full({3}, 7, at::kInt);
    if (rank == 0) {
      // Among tensors of the CPU those of the device keep their places.
      std::vector<at::Tensor> sent{on_meta(2), host, on_meta(5)};
      ASSERT_EQ(
          transport.send(1, Channel::kActivation, header, sent, 60),
          Outcome::kDone);
      EXPECT_THROW(
          transport.send(1, channel_of_route(0, false), header, sent, 60),
          c10::TypeError)
          << "a channel beyond those of the schedule has no lane";
      EXPECT_THROW(
          transport.send(1, Channel::kControl, header, sent, 60),
          c10::TypeError);
      EXPECT_EQ(
          log,
          (
              Log{"follow",
                  "(",
                  "send 16",
                  "send 40",
                  "the stream waits",
                  "the stream waits",
                  ")"}));
    } else {
      const int64_t ticket = transport.receive(0, Channel::kActivation, header);
      while (transport.wait(ticket, 1.0) == Outcome::kPending) {
      }
      EXPECT_EQ(
          log,
          (
              Log{"(",
                  "recv 16",
                  "recv 40",
                  "the stream waits",
                  "the stream waits",
                  ")"}));
      log.clear();
      const Message message = transport.take(ticket);
      EXPECT_EQ(log, (Log{"join", "lend 16", "lend 40"}));
      ASSERT_EQ(message.tensors.size(), 3u);
      EXPECT_TRUE(message.tensors[1].equal(host));
      EXPECT_EQ(message.tensors[2].sizes(), (std::vector<int64_t>{5}));
      EXPECT_TRUE(message.tensors[2].is_meta());
    }
    transport.flush(60);
    group->barrier()->wait();
    transport.close();
  });
  distributed::expect_no_errors(errors);
  for (const Log& log : logs) {
    EXPECT_EQ(std::count(log.begin(), log.end(), "the host waits"), 0);
  }
}

// Lanes match by order only, so the receives must be posted as the messages are
// asked for, whichever header comes first.
TEST(PipelineLanes, ReceivesArePostedInTheOrderOfTheAsks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto errors = on_ranks(2, [&](int rank, const auto& group) {
    const auto lanes = std::make_shared<Lanes>(
        rank,
        Links{{0, 1}, {1, 0}},
        [&](int64_t from, int64_t to) {
          return pair_group(store, rank, from, to);
        },
        c10::Device(c10::kCPU),
        1);
    Transport transport(group, {60.0, 2, 1, {0, 1}, {}}, lanes);
    transport.begin(1, false);
    const std::vector<Channel> channels{
        Channel::kActivation,
        Channel::kGradient,
        channel_of_route(0, false),
        channel_of_route(0, true)};
    constexpr uint32_t kRounds = 20;
    const auto order = [&](uint32_t round) {
      auto rotated = channels;
      std::rotate(rotated.begin(), rotated.begin() + round % 4, rotated.end());
      return rotated;
    };
    Header header;
    header.source = static_cast<uint16_t>(rank);
    header.target = static_cast<uint16_t>(1 - rank);
    header.structure = "t";
    Header expected;
    expected.source = header.target;
    expected.target = header.source;
    for (uint32_t round = 0; round < kRounds; ++round) {
      header.microbatch = expected.microbatch = round;
      std::vector<int64_t> tickets;
      for (const Channel channel : order(round)) {
        // Of one size, so that a swap would go unnoticed by the communicator.
        const auto number =
            static_cast<int64_t>(channel) + int64_t{100} * round;
        ASSERT_EQ(
            transport.send(
                1 - rank, channel, header, {at::full({50}, number)}, 60),
            Outcome::kDone);
        tickets.push_back(transport.receive(1 - rank, channel, expected));
      }
      // Waited for and taken the other way round.
      for (size_t i = tickets.size(); i-- > 0;) {
        while (transport.wait(tickets[i], 1.0) == Outcome::kPending) {
        }
        const Message message = transport.take(tickets[i]);
        EXPECT_EQ(
            message.tensors[0][49].item<int64_t>(),
            static_cast<int64_t>(order(round)[i]) + int64_t{100} * round);
      }
    }
    group->barrier()->wait();
    transport.close();
  });
  distributed::expect_no_errors(errors);
}

// Without lanes, or with others, a tensor of a device is the sender's error and
// the announcement of one the receiver's.
TEST(PipelineLanes, TensorsOfADeviceNeedLanesAtBothEnds) {
  const auto errors = on_ranks(2, [&](int rank, const auto& group) {
    Log log;
    const bool passed = false;
    std::shared_ptr<Lanes> lanes;
    if (rank == 0) {
      lanes = std::make_shared<Lanes>(
          0,
          Links{{0, 1}},
          [&](int64_t, int64_t) {
            return c10::make_intrusive<FakeGroup>(&log);
          },
          c10::Device(c10::kMeta),
          0,
          [&](c10::Device) {
            return std::make_unique<FakeStream>(&log, &passed);
          });
    }
    Transport transport(group, {60.0, 2, 1, {0, 1}, {}}, lanes);
    transport.begin(1, false);
    Header header;
    header.source = static_cast<uint16_t>(rank);
    header.target = static_cast<uint16_t>(1 - rank);
    header.structure = "t";
    if (rank == 1) {
      try {
        transport.send(0, Channel::kGradient, header, {on_meta(2)}, 60);
        ADD_FAILURE() << "expected a TypeError";
      } catch (const c10::TypeError& error) {
        EXPECT_NE(
            std::string(error.what()).find("on meta (argument 'tensors')"),
            std::string::npos)
            << error.what();
      }
      Header expected = header;
      std::swap(expected.source, expected.target);
      const int64_t ticket =
          transport.receive(0, Channel::kActivation, expected);
      while (transport.wait(ticket, 1.0) == Outcome::kPending) {
      }
      EXPECT_EQ(transport.wait(ticket, 1.0), Outcome::kLost);
      EXPECT_NE(
          transport.failure().find("expected tensors on the CPU"),
          std::string::npos)
          << transport.failure();
    } else {
      EXPECT_EQ(
          transport.send(1, Channel::kActivation, header, {on_meta(2)}, 60),
          Outcome::kDone);
      Header expected = header;
      std::swap(expected.source, expected.target);
      const int64_t ticket = transport.receive(1, Channel::kGradient, expected);
      while (transport.wait(ticket, 1.0) == Outcome::kPending) {
      }
      EXPECT_NE(
          transport.failure().find("expected tensors on the CPU"),
          std::string::npos);
    }
    transport.close();
  });
  distributed::expect_no_errors(errors);
}

} // namespace
} // namespace torch_sm3::pipeline

#endif
