// SPDX-License-Identifier: Apache-2.0
// Messages that leave.
#include <transport/engine.h>
#include <transport/payload.h>

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
  Lock lock(mutex_);
  Outgoing& link = outgoing(peer, channel);
  if (header.message_class != MessageClass::kPoison) {
    header.message_class = class_of(channel);
  }
  header.step = step_;
  header.flags = flags_;
  bool posted = false;
  try {
    const auto most = static_cast<size_t>(options_.max_pending - 1);
    const Time limit = limit_of(&link.full_since, seconds);
    const bool room = !lost() && make_room(lock, link, most, limit);
    if (lost() || stopping_) {
      return Outcome::kLost;
    }
    if (!room && !overdue(link.full_since)) {
      return Outcome::kPending;
    }
    if (room) {
      link.full_since.reset();
      lock.unlock();
      post(link, header, tensors);
      posted = true;
    }
  } catch (const c10::TypeError&) {
    throw; // the caller's tensors, not the link
  } catch (const HeaderError& error) {
    TORCH_CHECK_VALUE(false, error.what());
  } catch (const std::exception&) {
    lock = Lock();
    fail_with(lost_peer(peer), peer);
    return Outcome::kLost;
  }
  if (posted) {
    return Outcome::kDone;
  }
  lock.unlock();
  fail_with(timed_out(true, channel, header, peer));
  return Outcome::kLost;
}

void Transport::Engine::post(
    Outgoing& link,
    Header header,
    const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    header.tensors.push_back(meta_of(tensor));
  }
  const size_t rest = encode(header).size() - kFrameBytes;
  const bool small = rest + payload_size(tensors) <= kSmallPayload;
  header.flags |= small ? kTogether : 0;
  std::vector<uint8_t> bytes = encode(header);
  std::vector<at::Tensor> payload;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) {
      payload.push_back(payload_bytes(tensor));
    }
  }
  Parcel parcel;
  if (small) {
    for (const at::Tensor& part : payload) {
      const auto* data = part.const_data_ptr<uint8_t>();
      bytes.insert(bytes.end(), data, data + part.numel());
    }
    parcel.tensors = {as_tensor(bytes.data(), bytes.size())};
  } else {
    parcel.tensors = {as_tensor(bytes.data(), kFrameBytes)};
    if (bytes.size() > kFrameBytes) {
      parcel.tensors.push_back(
          as_tensor(bytes.data() + kFrameBytes, bytes.size() - kFrameBytes));
    }
    parcel.tensors.insert(parcel.tensors.end(), payload.begin(), payload.end());
  }
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

// The frame, then what did not fit it.
void Transport::Engine::post_parcel(const Outgoing& link, Parcel& parcel) {
  int tag = link.tag;
  for (const at::Tensor& tensor : parcel.tensors) {
    std::vector<at::Tensor> one{tensor};
    parcel.works.push_back(group_->send(one, static_cast<int>(link.peer), tag));
    tag = payload_tag(link.tag);
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
  return sum;
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
