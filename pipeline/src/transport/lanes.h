// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <transport/lane_streams.h>

#include <torch_sm3/export.h>
#include <torch_sm3/pipeline/channel.h>
#include <torch_sm3/pipeline/header.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

namespace torch_sm3::pipeline {

// One directed link for the payload of a device: a communicator of two ranks
// and a stream. Such communicators match messages by their order only, so both
// ends must agree on it; the verifier sees to that. One caller at a time may
// send or receive.
class TORCH_SM3_API Lane {
 public:
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  // `peer` is the other end's rank in `group`.
  Lane(Group group, int peer, std::unique_ptr<LaneStream> stream);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Moves one element, so that the communicator exists when the schedule
  // begins.
  void open(bool sends, c10::Device device);

  // Queues tensors behind what the caller's stream makes of them; keeps them
  // until they have left.
  void send(const std::vector<at::Tensor>& tensors);

  // Tensors that are on their way.
  struct Arrival {
    std::vector<at::Tensor> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works; // for the host to wait
    LaneStream::Mark mark;
  };
  // Queues the next tensors, with memory of the lane's own stream, so that they
  // need not wait for what the caller's stream has to do.
  Arrival receive(const std::vector<TensorMeta>& metas, c10::Device device);
  // Lets the caller's stream, not the host, wait for them.
  void join(const Arrival& arrival);

  // Messages that are not known to have left.
  size_t pending();
  // Ends: waits until what the host sent has left; what a device sends leaves
  // by itself.
  void close(std::chrono::milliseconds longest);

 private:
  struct Parcel {
    std::vector<at::Tensor> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    LaneStream::Mark mark;
  };

  bool has_left(const Parcel& parcel);

  Group group_;
  int peer_;
  std::unique_ptr<LaneStream> stream_;
  std::deque<Parcel> parcels_;
};

// The directed links of a rank.
class TORCH_SM3_API Lanes {
 public:
  using Link = std::pair<int64_t, int64_t>; // from and to
  using Open = std::function<Lane::Group(int64_t from, int64_t to)>;
  using MakeStream = std::function<std::unique_ptr<LaneStream>(c10::Device)>;

  // Opens the links that begin or end at `rank`, in ascending order. All ranks
  // open in this one order, so the least link that is not open yet has both its
  // ends waiting for it, and no two ranks wait for each other over unlike ones.
  //
  // \param routes number of the schedule's routes: theirs are the last channels
  //               whose payload takes a lane
  Lanes(
      int64_t rank,
      std::vector<Link> links,
      const Open& open,
      c10::Device device,
      uint32_t routes,
      const MakeStream& stream = make_lane_stream);

  c10::Device device() const {
    return device_;
  }
  // Whether the messages of a channel to or from a peer may have a payload
  // here.
  bool leads_to(int64_t peer, Channel channel) const {
    return has(channel) && out_.count(peer) > 0;
  }
  bool comes_from(int64_t peer, Channel channel) const {
    return has(channel) && in_.count(peer) > 0;
  }
  // Whether this is a channel of the schedule, whose messages are sent and
  // asked for in one order.
  bool has(Channel channel) const;
  Lane& to(int64_t peer) {
    return *out_.at(peer);
  }
  Lane& from(int64_t peer) {
    return *in_.at(peer);
  }
  size_t pending();
  void close(std::chrono::milliseconds longest);

 private:
  c10::Device device_;
  uint32_t routes_;
  std::map<int64_t, std::unique_ptr<Lane>> out_;
  std::map<int64_t, std::unique_ptr<Lane>> in_;
};

} // namespace torch_sm3::pipeline
