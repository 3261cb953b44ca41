// SPDX-License-Identifier: Apache-2.0
// Payload that a device's own communicators move.
#include <transport/lanes.h>
#include <transport/payload.h>

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

// A device says by an event what has left; a message of the host has to be
// waited for, which is done when this many later ones are under way.
constexpr size_t kMostOnHost = 16;

} // namespace

Lane::Lane(Group group, int peer, std::unique_ptr<LaneStream> stream)
    : group_(std::move(group)), peer_(peer), stream_(std::move(stream)) {}

Lane::~Lane() {
  for (const Parcel& parcel : parcels_) {
    for (const at::Tensor& tensor : parcel.tensors) {
      stream_->keep(tensor);
    }
  }
}

void Lane::open(bool sends, c10::Device device) {
  if (sends) {
    send({at::zeros({1}, at::TensorOptions(at::kByte).device(device))});
  } else {
    join(receive({{static_cast<int8_t>(at::kByte), false, {1}}}, device));
  }
}

void Lane::send(const std::vector<at::Tensor>& tensors) {
  pending(); // lets go of what has left
  Parcel parcel;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) {
      parcel.tensors.push_back(payload_bytes(tensor)); // of any dtype
    }
  }
  stream_->follow_caller();
  parcel.mark = stream_->run([&] {
    const Unprofiled guard;
    for (const at::Tensor& tensor : parcel.tensors) {
      std::vector<at::Tensor> one{tensor};
      parcel.works.push_back(group_->send(one, peer_, /*tag=*/0));
    }
    for (const auto& work : parcel.works) {
      work->synchronize(); // lets the lane's stream wait; nothing on the host
    }
  });
  parcels_.push_back(std::move(parcel));
}

Lane::Arrival
Lane::receive(const std::vector<TensorMeta>& metas, c10::Device device) {
  Arrival arrival;
  arrival.mark = stream_->run([&] {
    const Unprofiled guard;
    for (const TensorMeta& meta : metas) {
      arrival.tensors.push_back(allocate(meta, SIZE_MAX, device));
      if (!meta.empty()) {
        std::vector<at::Tensor> one{payload_bytes(arrival.tensors.back())};
        arrival.works.push_back(group_->recv(one, peer_, /*tag=*/0));
      }
    }
    for (const auto& work : arrival.works) {
      work->synchronize(); // lets the lane's stream wait; nothing on the host
    }
  });
  return arrival;
}

void Lane::join(const Arrival& arrival) {
  if (stream_->on_host()) {
    for (const auto& work : arrival.works) {
      work->wait(); // there is no stream to wait in the host's stead
    }
    return;
  }
  stream_->join(arrival.mark);
  for (const at::Tensor& tensor : arrival.tensors) {
    stream_->lend(tensor);
  }
}

bool Lane::has_left(const Parcel& parcel) {
  if (!stream_->on_host()) {
    return stream_->passed(parcel.mark);
  }
  if (parcels_.size() < kMostOnHost) {
    return false;
  }
  for (const auto& work : parcel.works) {
    work->wait();
  }
  return true;
}

size_t Lane::pending() {
  while (!parcels_.empty() && has_left(parcels_.front())) {
    parcels_.pop_front();
  }
  return parcels_.size();
}

void Lane::close(std::chrono::milliseconds longest) {
  try {
    for (const Parcel& parcel : parcels_) {
      for (const auto& work : parcel.works) {
        if (stream_->on_host()) {
          work->wait(longest);
        }
      }
    }
  } catch (const std::exception&) {
    parcels_.clear(); // the peer is gone, and with it what it was to get
  }
}

Lanes::Lanes(
    int64_t rank,
    std::vector<Link> links,
    const Open& open,
    c10::Device device,
    uint32_t routes,
    const MakeStream& stream)
    : device_(device), routes_(routes) {
  std::sort(links.begin(), links.end());
  links.erase(std::unique(links.begin(), links.end()), links.end());
  for (const auto& [from, to] : links) {
    if (from != rank && to != rank) {
      continue;
    }
    // A link begins at rank 0 of its two.
    const bool sends = from == rank;
    auto lane =
        std::make_unique<Lane>(open(from, to), sends ? 1 : 0, stream(device));
    lane->open(sends, device);
    (sends ? out_[to] : in_[from]) = std::move(lane);
  }
}

bool Lanes::has(Channel channel) const {
  const auto number = static_cast<uint32_t>(channel);
  return channel != Channel::kControl &&
         number < static_cast<uint32_t>(Channel::kRoutes) + 2 * routes_;
}

size_t Lanes::pending() {
  size_t sum = 0;
  for (auto& entry : out_) {
    sum += entry.second->pending();
  }
  return sum;
}

void Lanes::close(std::chrono::milliseconds longest) {
  for (auto& entry : out_) {
    entry.second->close(longest);
  }
}

} // namespace torch_sm3::pipeline
