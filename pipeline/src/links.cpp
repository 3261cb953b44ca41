// SPDX-License-Identifier: Apache-2.0
// What the threads of a Transport do, one thread per directed link and class.
#include <engine.h>
#include <payload.h>

namespace torch_sm3::pipeline {
namespace {

// Gloo closes all connections of a group when one wait times out, so no wait of
// ours ever does: whoever needs the message has a time limit of its own.
constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 3650);

std::string rank_name(int64_t rank) {
  return "rank " + std::to_string(rank);
}

} // namespace

// The caller holds mutex_ in both.
Transport::Engine::Link&
Transport::Engine::outgoing(int64_t peer, MessageClass link_class) {
  std::unique_ptr<Link>& link = outgoing_[{peer, link_class}];
  if (!link) {
    link = std::make_unique<Link>();
    link->peer = peer;
    link->link_class = link_class;
    link->tag = tag(link_class, rank_, peer);
    launch(*link, &Engine::run_outgoing);
  }
  return *link;
}

Transport::Engine::Link&
Transport::Engine::incoming(int64_t peer, MessageClass link_class) {
  std::unique_ptr<Link>& link = incoming_[{peer, link_class}];
  if (!link) {
    link = std::make_unique<Link>();
    link->peer = peer;
    link->link_class = link_class;
    link->tag = tag(link_class, peer, rank_);
    launch(
        *link,
        link_class == MessageClass::kControl ? &Engine::run_control
                                             : &Engine::run_incoming);
  }
  return *link;
}

int Transport::Engine::tag(MessageClass link_class, int64_t from, int64_t to)
    const {
  return static_cast<int>(
      (static_cast<int64_t>(link_class) * size_ + from) * size_ + to);
}

void Transport::Engine::launch(Link& link, void (Engine::*run)(Link&)) {
  // The links live as long as the engine, which the thread keeps alive.
  link.thread = std::thread([self = shared_from_this(), &link, run] {
    try {
      ((*self).*run)(link);
    } catch (const HeaderError& error) {
      self->fail_with(self->broken_protocol(link, error.what()));
    } catch (const std::exception&) {
      self->fail_with(self->lost_peer(link.peer), link.peer);
    }
    const Lock lock(self->mutex_);
    link.finished = true;
    link.parcels.clear();
    self->changed_.notify_all();
  });
}

Failure Transport::Engine::lost_peer(int64_t peer) const {
  const auto index = static_cast<size_t>(peer);
  const int64_t stage =
      index < options_.first_stage.size() ? options_.first_stage[index] : peer;
  return {
      peer,
      stage,
      0,
      "",
      "PeerLost",
      rank_name(peer) + " ended or left the pipeline"};
}

Failure Transport::Engine::broken_protocol(
    const Link& link,
    const std::string& what) const {
  const Lock lock(mutex_);
  Failure failure{rank_, 0, 0, "", "ProtocolError", ""};
  failure.message = rank_name(rank_) + " expected ";
  if (link.asked.empty()) {
    failure.message += "a message";
  } else {
    const Header& expected = link.asked.front()->expected;
    failure.stage = expected.target;
    failure.microbatch = expected.microbatch;
    failure.message += describe(expected);
  }
  failure.message +=
      ", but " + rank_name(link.peer) + " sent another message: " + what;
  return failure;
}

// Waits for work of the thread of `link`; false if the transport closes.
bool Transport::Engine::await(Link& link, const Work& work) {
  {
    const Lock lock(mutex_);
    if (stopping_) {
      return false;
    }
    link.current = work;
  }
  const bool done = work->wait(kForever);
  const Lock lock(mutex_);
  link.current.reset();
  return done && !stopping_;
}

void Transport::Engine::post(
    Link& link,
    Header header,
    const std::vector<at::Tensor>& tensors) {
  Parcel parcel;
  for (const at::Tensor& tensor : tensors) {
    header.tensors.push_back(meta_of(tensor));
  }
  const std::vector<uint8_t> bytes = encode(header);
  parcel.tensors.push_back(as_tensor(bytes.data(), kFrameBytes));
  if (bytes.size() > kFrameBytes) {
    parcel.tensors.push_back(
        as_tensor(bytes.data() + kFrameBytes, bytes.size() - kFrameBytes));
  }
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) {
      parcel.tensors.push_back(payload_bytes(tensor));
    }
  }
  const Lock posting(posting_);
  for (const at::Tensor& tensor : parcel.tensors) {
    std::vector<at::Tensor> one{tensor};
    parcel.works.push_back(
        group_->send(one, static_cast<int>(link.peer), link.tag));
  }
  const Lock lock(mutex_);
  link.parcels.push_back(std::move(parcel));
  link.wake.notify_one();
}

void Transport::Engine::run_outgoing(Link& link) {
  while (true) {
    std::vector<Work> works;
    {
      Lock lock(mutex_);
      link.wake.wait(lock, [&] { return stopping_ || !link.parcels.empty(); });
      if (stopping_) {
        return;
      }
      works = link.parcels.front().works;
    }
    for (const Work& work : works) {
      if (!await(link, work)) {
        return;
      }
    }
    Parcel left; // freed after the lock
    const Lock lock(mutex_);
    left = std::move(link.parcels.front());
    link.parcels.pop_front();
    changed_.notify_all();
  }
}

// Appends `size` bytes from the peer; false if the transport closes.
bool Transport::Engine::pull_bytes(
    Link& link,
    size_t size,
    std::vector<uint8_t>* bytes) {
  const at::Tensor frame = empty_bytes(size);
  if (!await(link, post_receive(link, frame))) {
    return false;
  }
  const auto* data = frame.const_data_ptr<uint8_t>();
  bytes->insert(bytes->end(), data, data + size);
  return true;
}

Transport::Engine::Work
Transport::Engine::post_receive(Link& link, const at::Tensor& bytes) {
  std::vector<at::Tensor> one{bytes};
  const Lock posting(posting_);
  return group_->recv(one, static_cast<int>(link.peer), link.tag);
}

// Receives one message; `expected` is compared before anything is allocated
// for it. Nothing is returned if the transport closes.
std::optional<Message>
Transport::Engine::pull(Link& link, const Header* expected) {
  std::vector<uint8_t> bytes;
  if (!pull_bytes(link, kFrameBytes, &bytes)) {
    return std::nullopt;
  }
  const Header head = decode_fixed(bytes.data());
  if (expected != nullptr) {
    check(*expected, head);
  }
  if (const size_t more = second_frame_bytes(bytes.data())) {
    if (!pull_bytes(link, more, &bytes)) {
      return std::nullopt;
    }
  }
  Message message{decode(bytes), {}};
  std::vector<Work> works;
  for (const TensorMeta& meta : message.header.tensors) {
    message.tensors.push_back(allocate(meta));
    if (message.tensors.back().numel() > 0) {
      works.push_back(
          post_receive(link, payload_bytes(message.tensors.back())));
    }
  }
  for (const Work& work : works) {
    if (!await(link, work)) {
      return std::nullopt;
    }
  }
  return message;
}

void Transport::Engine::check(const Header& expected, const Header& header) {
  const bool same =
      (header.message_class == expected.message_class ||
       header.message_class == MessageClass::kPoison) &&
      header.flags == expected.flags && header.step == expected.step &&
      header.epoch == expected.epoch &&
      header.microbatch == expected.microbatch &&
      header.source == expected.source && header.target == expected.target;
  if (!same) {
    throw HeaderError(describe(header));
  }
}

void Transport::Engine::run_incoming(Link& link) {
  while (true) {
    std::shared_ptr<Receipt> receipt;
    {
      Lock lock(mutex_);
      link.wake.wait(lock, [&] { return stopping_ || !link.asked.empty(); });
      if (stopping_) {
        return;
      }
      receipt = link.asked.front();
    }
    std::optional<Message> message = pull(link, &receipt->expected);
    if (!message) {
      return;
    }
    const Lock lock(mutex_);
    receipt->message = std::move(message);
    link.asked.pop_front();
    changed_.notify_all();
  }
}

// Control messages are received before anyone asks, because an alarm may come
// at any time.
void Transport::Engine::run_control(Link& link) {
  while (std::optional<Message> message = pull(link, nullptr)) {
    if ((message->header.flags & kAlarm) != 0) {
      fail(message->header.structure, link.peer);
      continue;
    }
    const Lock lock(mutex_);
    link.unasked.push_back(std::move(*message));
    match(link);
  }
}

// Gives control messages to those who asked; the caller holds mutex_.
void Transport::Engine::match(Link& link) {
  while (!link.asked.empty() && !link.unasked.empty()) {
    check(link.asked.front()->expected, link.unasked.front().header);
    link.asked.front()->message = std::move(link.unasked.front());
    link.asked.pop_front();
    link.unasked.pop_front();
    changed_.notify_all();
  }
}

void Transport::Engine::stop(Link& link) {
  // A wait that starts later sees stopping_; one that runs is aborted, again
  // and again, because an abort may come a moment before its wait.
  const auto give_up = Clock::now() + std::chrono::seconds(2);
  while (true) {
    Work current;
    {
      const Lock lock(mutex_);
      if (link.finished || Clock::now() > give_up) {
        break;
      }
      current = link.current;
      link.wake.notify_all();
    }
    if (current) {
      try {
        current->abort();
      } catch (const std::exception&) {
        // Not every backend can; its thread is left to end by itself.
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const bool finished = [&] {
    const Lock lock(mutex_);
    return link.finished;
  }();
  if (finished) {
    link.thread.join();
  } else {
    link.thread.detach();
  }
}

} // namespace torch_sm3::pipeline
