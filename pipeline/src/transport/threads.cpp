// SPDX-License-Identifier: Apache-2.0
// Messages that threads receive while the caller computes.
#include <transport/engine.h>
#include <transport/payload.h>

namespace torch_sm3::pipeline {

void Transport::Engine::launch(Incoming& link, void (Engine::*run)(Incoming&)) {
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
  });
}

// Waits for work of the thread of `link`; false if the transport closes.
bool Transport::Engine::await(Incoming& link, const Work& work) {
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

// Receives what follows a frame; nothing is returned if the transport closes.
// For the link's thread.
std::optional<Message>
Transport::Engine::pull_rest(Incoming& link, const at::Tensor& buffer) {
  const auto* data = buffer.const_data_ptr<uint8_t>();
  const int tag = payload_tag(link.tag);
  std::vector<uint8_t> bytes(data, data + kFrameBytes);
  if (const size_t more = second_frame_bytes(data)) {
    const at::Tensor frame = empty_bytes(more);
    if (!await(link, post_receive(link, frame, tag))) {
      return std::nullopt;
    }
    const auto* rest = frame.const_data_ptr<uint8_t>();
    bytes.insert(bytes.end(), rest, rest + more);
  }
  Message message{decode(bytes), {}};
  std::vector<Work> works;
  for (const TensorMeta& meta : message.header.tensors) {
    message.tensors.push_back(allocate(meta));
    if (message.tensors.back().numel() > 0) {
      works.push_back(
          post_receive(link, payload_bytes(message.tensors.back()), tag));
    }
  }
  for (const Work& work : works) {
    if (!await(link, work)) {
      return std::nullopt;
    }
  }
  return message;
}

// Receives messages with a payload of its own while the caller computes.
void Transport::Engine::run_incoming(Incoming& link) {
  while (true) {
    std::shared_ptr<Receipt> receipt;
    {
      Lock lock(mutex_);
      link.wake.wait(lock, [&] {
        return stopping_ ||
               (!link.asked.empty() && link.asked.front()->threaded);
      });
      if (stopping_) {
        return;
      }
      receipt = link.asked.front();
    }
    if (receipt->frame) {
      if (!await(link, receipt->frame)) {
        return;
      }
      const Lock lock(mutex_);
      link.large = !open_frame(link, *receipt);
    }
    if (!receipt->message) {
      std::optional<Message> message = pull_rest(link, receipt->buffer);
      if (!message) {
        return;
      }
      const Lock lock(mutex_);
      receipt->message = std::move(message);
      link.spare.push_back(std::move(receipt->buffer));
    }
    const Lock lock(mutex_);
    link.asked.pop_front();
    post_frames(link);
    next_message(link);
    changed_.notify_all();
  }
}

// Control messages are received before anyone asks, because an alarm may come
// at any time.
void Transport::Engine::run_control(Incoming& link) {
  const at::Tensor buffer = empty_bytes(kFrameBytes + kSmallPayload);
  while (await(link, post_receive(link, buffer, link.tag))) {
    const Header head = decode_fixed(buffer.const_data_ptr<uint8_t>());
    std::optional<Message> message = (head.flags & kTogether) != 0
                                         ? unpack(buffer)
                                         : pull_rest(link, buffer);
    if (!message) {
      return;
    }
    const Header& header = message->header;
    if ((header.flags & kAlarm) != 0) {
      settle(header.structure, link.peer);
      continue;
    }
    if ((header.flags & kReport) != 0) {
      const auto awaited = static_cast<int64_t>(header.microbatch) - 1;
      consider({link.peer, awaited, -1, header.structure});
      continue;
    }
    Lock lock(mutex_);
    if ((header.flags & kGoodbye) != 0) {
      link.left = true;
      const bool owes =
          !link.asked.empty() || (verdict_at_ && link.peer == options_.hub);
      lock.unlock();
      if (owes) {
        fail_with(lost_peer(link.peer), link.peer);
      }
      return;
    }
    link.unasked.push_back(std::move(*message));
    match(link);
  }
}

// Gives control messages to those who asked; the caller holds mutex_.
void Transport::Engine::match(Incoming& link) {
  while (!link.asked.empty() && !link.unasked.empty()) {
    check(link.asked.front()->expected, link.unasked.front().header);
    link.asked.front()->message = std::move(link.unasked.front());
    link.asked.pop_front();
    link.unasked.pop_front();
    changed_.notify_all();
  }
}

} // namespace torch_sm3::pipeline
