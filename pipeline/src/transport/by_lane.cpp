// SPDX-License-Identifier: Apache-2.0
// Tensors that come by a lane, after their headers.
#include <transport/engine.h>

#include <algorithm>

namespace torch_sm3::pipeline {

// Notes whether tensors of a message whose header is here come by a lane.
void Transport::Engine::announce_lane(Receipt& receipt) const {
  const std::vector<TensorMeta>& metas = receipt.arriving->header.tensors;
  receipt.unposted = std::any_of(
      metas.begin(), metas.end(), [](const auto& m) { return m.on_device; });
  if (receipt.unposted &&
      (!lanes_ || !lanes_->comes_from(receipt.peer, receipt.channel))) {
    throw HeaderError("header: expected tensors on the CPU");
  }
}

// Receives what the headers of a peer have announced. The caller holds mutex_.
void Transport::Engine::post_lane(int64_t peer) {
  auto& order = by_lane_[peer];
  while (!order.empty() && order.front()->message && !stopping_) {
    Receipt& first = *order.front();
    if (first.unposted) {
      std::vector<TensorMeta> metas;
      for (const TensorMeta& meta : first.message->header.tensors) {
        if (meta.on_device) {
          metas.push_back(meta);
        }
      }
      first.arrival = lanes_->from(peer).receive(metas, lanes_->device());
      first.unposted = false;
    }
    order.pop_front();
  }
}

// Puts the tensors that come by a lane into their places, for the one caller of
// the channel. On the CPU, which has no streams, this waits.
void Transport::Engine::take_from_lane(
    const Receipt& receipt,
    Message& message) {
  if (receipt.arrival.tensors.empty()) {
    return;
  }
  lanes_->from(receipt.peer).join(receipt.arrival);
  auto next = receipt.arrival.tensors.begin();
  for (size_t i = 0; i < message.tensors.size(); ++i) {
    if (message.header.tensors[i].on_device) {
      message.tensors[i] = *next++;
    }
  }
}

} // namespace torch_sm3::pipeline
