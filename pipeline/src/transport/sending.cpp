// SPDX-License-Identifier: Apache-2.0
// Messages that leave.
#include <transport/engine.h>
#include <transport/payload.h>

#include <algorithm>

namespace torch_sm3::pipeline {
// Waits until at most `most` messages of a link are under way.
bool Transport::Engine::make_room(
    Lock& lock,
    Outgoing& link,
    size_t most,
    Time limit) {
  while (link.parcels.size() > most) {
    const Parcel& first = link.parcels.front();
    if (first.due) {
      const auto posted = [&] { return !first.due || stopping_; };
      if (!changed_.wait_until(lock, limit, posted) || stopping_) {
        return false;
      }
    }
    std::deque<Work>& works = link.parcels.front().works;
    if (works.empty()) {
      link.parcels.pop_front();
      continue;
    }
    const Work work = works.front();
    if (!wait_for(lock, work, limit)) {
      return false;
    }
    works.pop_front();
  }
  return true;
}

Outcome Transport::Engine::send(
    int64_t peer,
    Channel channel,
    Header header,
    const std::vector<at::Tensor>& tensors,
    double seconds) {
  if (header.message_class != MessageClass::kPoison) {
    header.message_class = class_of(channel);
  }
  Outgoing* link = nullptr;
  {
    const Lock lock(mutex_);
    link = &outgoing(peer, channel);
    header.step = step_;
    header.flags = flags_;
  }
  try {
    const Outcome room = await_room(*link, channel, header, seconds);
    if (room != Outcome::kDone) {
      return room;
    }
  } catch (const std::exception&) {
    fail_with(lost_peer(peer), peer);
    return Outcome::kLost;
  }
  // What fails here is the caller's message; what fails later is the link.
  std::vector<at::Tensor> by_lane;
  for (const at::Tensor& tensor : tensors) {
    const bool on_device = lanes_ && tensor.device() == lanes_->device() &&
                           lanes_->leads_to(peer, channel);
    header.tensors.push_back(meta_of(tensor, on_device));
    if (on_device) {
      by_lane.push_back(tensor);
    }
  }
  Parcel parcel = wrap(*link, std::move(header), tensors);
  try {
    post(*link, std::move(parcel));
    if (!by_lane.empty()) {
      lanes_->to(peer).send(by_lane);
    }
    let_others_run();
  } catch (const std::exception&) {
    fail_with(lost_peer(peer), peer);
    return Outcome::kLost;
  }
  return Outcome::kDone;
}

// Waits until one more message of a link may be under way.
Outcome Transport::Engine::await_room(
    Outgoing& link,
    Channel channel,
    const Header& header,
    double seconds) {
  Lock lock(mutex_);
  const auto most = static_cast<size_t>(options_.max_pending - 1);
  const Time limit = limit_of(&link.full_since, seconds);
  const bool room = !lost() && make_room(lock, link, most, limit);
  if (lost() || stopping_) {
    return Outcome::kLost;
  }
  if (room) {
    link.full_since.reset();
    return Outcome::kDone;
  }
  if (!overdue(link.full_since)) {
    return Outcome::kPending;
  }
  lock.unlock();
  fail_with(timed_out(true, channel, header, link.peer));
  return Outcome::kLost;
}

// Puts a header, which describes the tensors, and what of them goes with it
// into the form in which they travel. For the one caller of the channel;
// nothing throws once the link has changed.
Transport::Engine::Parcel Transport::Engine::wrap(
    Outgoing& link,
    Header header,
    const std::vector<at::Tensor>& tensors) {
  const size_t rest = encoded_bytes(header) - kFrameBytes;
  size_t payload = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    payload += header.tensors[i].travels() ? payload_size(tensors[i]) : 0;
  }
  const bool small = rest <= kSmallPayload && payload <= kSmallPayload - rest;
  const bool offered = !small && same_layout(link.layout, header.tensors);
  header.flags |= small ? kTogether : offered ? kOffered : 0;
  std::vector<uint8_t> bytes;
  try {
    bytes = encode(header);
  } catch (const HeaderError& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  Parcel parcel;
  if (small) {
    const at::Tensor whole = empty_bytes(bytes.size() + payload);
    auto* to = std::copy(
        bytes.begin(), bytes.end(), whole.mutable_data_ptr<uint8_t>());
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (header.tensors[i].travels()) {
        to = copy_payload(tensors[i], to);
      }
    }
    parcel.parts.push_back({whole, kFrameTag});
  } else {
    parcel.parts.push_back({as_tensor(bytes.data(), kFrameBytes), kFrameTag});
    if (rest > 0) {
      parcel.parts.push_back(
          {as_tensor(bytes.data() + kFrameBytes, rest), kRestTag});
    }
  }
  for (const TensorMeta& meta : link.layout) {
    if (!offered && meta.travels()) {
      parcel.parts.push_back({as_tensor(bytes.data(), 1), kOfferTag});
    }
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!small && header.tensors[i].travels()) {
      parcel.parts.push_back(
          {payload_bytes(tensors[i]), offered ? kOfferTag : kRestTag});
    }
  }
  if (link.foretells) {
    link.layout = small ? std::vector<TensorMeta>() : header.tensors;
  }
  return parcel;
}

void Transport::Engine::post(Outgoing& link, Parcel parcel) {
  const Lock posting(posting_);
  if (link.delay.count() == 0) {
    post_parcel(link, parcel);
  }
  const Lock lock(mutex_);
  if (link.delay.count() > 0) {
    parcel.due = Clock::now() + link.delay;
    delaying_.notify_all();
  }
  link.parcels.push_back(std::move(parcel));
}

void Transport::Engine::post_parcel(const Outgoing& link, Parcel& parcel) {
  const Unprofiled guard;
  for (const Part& part : parcel.parts) {
    std::vector<at::Tensor> one{part.bytes};
    parcel.works.push_back(
        group_->send(one, static_cast<int>(link.peer), link.tag + part.tag));
  }
}

// Posts the messages whose time has come; returns when the next one's comes.
// The caller holds mutex_, and learns by `peer` to whom a post failed.
std::optional<Transport::Engine::Time>
Transport::Engine::post_due(int64_t* peer) {
  std::optional<Time> next;
  for (auto& entry : outgoing_) {
    *peer = entry.second->peer;
    for (Parcel& parcel : entry.second->parcels) {
      if (parcel.due && *parcel.due <= Clock::now()) {
        post_parcel(*entry.second, parcel);
        parcel.due.reset();
        changed_.notify_all();
      } else if (parcel.due) {
        next = std::min(next.value_or(*parcel.due), *parcel.due);
        break; // those behind it are due later
      }
    }
  }
  return next;
}

void Transport::Engine::run_delayed() {
  Lock lock(mutex_);
  int64_t peer = rank_;
  try {
    while (!stopping_) {
      if (const std::optional<Time> next = post_due(&peer)) {
        delaying_.wait_until(lock, *next);
      } else {
        delaying_.wait(lock);
      }
    }
  } catch (const std::exception&) {
    lock.unlock();
    fail_with(lost_peer(peer), peer);
  }
}

int64_t Transport::Engine::pending() const {
  const Lock lock(mutex_);
  int64_t sum = 0;
  for (const auto& entry : outgoing_) {
    sum += static_cast<int64_t>(entry.second->parcels.size());
  }
  return sum + (lanes_ ? static_cast<int64_t>(lanes_->pending()) : 0);
}

bool Transport::Engine::flush(double seconds) {
  const Time limit = Clock::now() + in_seconds(seconds);
  bool all = true;
  Lock lock(mutex_);
  for (auto& entry : outgoing_) {
    try {
      all = make_room(lock, *entry.second, 0, limit) && all;
    } catch (const std::exception&) {
      entry.second->parcels.clear(); // that peer is gone
    }
  }
  return all;
}

} // namespace torch_sm3::pipeline
