// SPDX-License-Identifier: Apache-2.0
// Messages that a caller receives.
#include <transport/engine.h>
#include <transport/payload.h>

#include <algorithm>

namespace torch_sm3::pipeline {
int64_t
Transport::Engine::expect(int64_t peer, Channel channel, Header expected) {
  const Lock lock(mutex_);
  const int64_t ticket = next_ticket_++;
  auto receipt = std::make_shared<Receipt>();
  expected.message_class = class_of(channel);
  expected.step = step_;
  expected.flags = flags_;
  receipt->peer = peer;
  receipt->channel = channel;
  receipt->expected = std::move(expected);
  receipts_[ticket] = receipt;
  if (!lost() && !stopping_) {
    incoming(peer, channel).queue.push_back(std::move(receipt));
  }
  return ticket;
}

void Transport::Engine::ask(int64_t ticket) {
  Lock lock(mutex_);
  const std::shared_ptr<Receipt> receipt = receipt_of(ticket);
  receipt->asked = true;
  Incoming& link = incoming(receipt->peer, receipt->channel);
  if (lost() || stopping_) {
    return;
  }
  try {
    if (receipt->channel == Channel::kControl) {
      receipt->threaded = true;
      match(link);
      const bool never = link.left && !link.queue.empty();
      lock.unlock();
      if (never) {
        fail_with(lost_peer(receipt->peer), receipt->peer);
      }
      return;
    }
    if (lanes_ && lanes_->has(receipt->channel)) {
      by_lane_[receipt->peer].push_back(receipt);
    }
    post_frames(link);
    if (link.queue.front() == receipt || falls_behind(link)) {
      next_message(link);
    }
    lock.unlock();
    let_others_run();
  } catch (const HeaderError& error) {
    const std::string what = error.what();
    lock.unlock();
    fail_with(broken_protocol(link, what));
  } catch (const std::exception&) {
    lock.unlock();
    fail_with(lost_peer(receipt->peer), receipt->peer);
  }
}

std::shared_ptr<Transport::Engine::Receipt>
Transport::Engine::receipt_of(int64_t ticket) const {
  const auto found = receipts_.find(ticket);
  TORCH_CHECK_VALUE(
      found != receipts_.end(),
      "PipelineTransport: expected a ticket of receive, but got ",
      ticket,
      " (argument 'ticket')");
  return found->second;
}

at::Tensor Transport::Engine::take_buffer(Incoming& link) {
  if (link.spare.empty()) {
    return empty_bytes(kFrameBytes + kSmallPayload);
  }
  at::Tensor buffer = std::move(link.spare.back());
  link.spare.pop_back();
  return buffer;
}

// Begins to receive the frames of the next messages, so that they leave their
// sender even while their receiver computes or waits for something else.
void Transport::Engine::post_frames(Incoming& link) {
  const size_t most =
      link.posted < kFew ? std::min(link.queue.size(), kAhead) : 0;
  for (; link.posted < most; ++link.posted) {
    Receipt& receipt = *link.queue[link.posted];
    receipt.buffer = take_buffer(link);
    receipt.works.push_back(
        post_receive(link, receipt.buffer, link.tag + kFrameTag));
  }
}

// Goes on to the next message of a link, the first one being here.
void Transport::Engine::pop(Incoming& link) {
  link.queue.pop_front();
  --link.posted;
  post_frames(link);
  next_message(link);
}

// Whether so much was asked for and not received that the sender may soon wait:
// a schedule may ask for messages long before it uses them.
bool Transport::Engine::falls_behind(const Incoming& link) {
  const size_t many = link.large ? 2 : kFew;
  return link.queue.size() >= many && link.queue[many - 1]->asked;
}

// Makes ready for the first message of a link if it was asked for, and decides
// who receives it.
void Transport::Engine::next_message(Incoming& link) {
  if (link.queue.empty() || !link.queue.front()->asked) {
    return;
  }
  Receipt& first = *link.queue.front();
  offer(link, first);
  // A thread, because a lane's receive is posted as soon as the header is here.
  first.threaded = link.surprised || stuck_ > 0 || falls_behind(link) ||
                   (lanes_ && lanes_->has(first.channel));
  if (!first.threaded) {
    return;
  }
  if (!link.thread.joinable()) {
    launch(link, &Engine::run_incoming);
  }
  link.wake.notify_one();
}

// Begins to receive a payload like the one before. Whoever waits for the
// message waits for this first: it comes after the frame, whatever it is.
void Transport::Engine::offer(Incoming& link, Receipt& receipt) {
  if (receipt.phase != Phase::kFrame || !receipt.offer.empty()) {
    return;
  }
  std::deque<Work> works;
  for (const TensorMeta& meta : link.layout) {
    receipt.offer.push_back(meta.on_device ? at::Tensor() : allocate(meta));
    if (meta.travels()) {
      const at::Tensor bytes = payload_bytes(receipt.offer.back());
      works.push_back(post_receive(link, bytes, link.tag + kOfferTag));
    }
  }
  receipt.works.insert(receipt.works.begin(), works.begin(), works.end());
}

// Lets the threads receive what was asked for, while a caller waits for another
// thing: its peer may wait for one of these messages to leave.
void Transport::Engine::hand_over() {
  for (auto& entry : incoming_) {
    Incoming& link = *entry.second;
    if (entry.first.second != Channel::kControl && !link.queue.empty() &&
        !link.queue.front()->threaded && !link.queue.front()->awaited) {
      next_message(link);
    }
  }
}

// Does what can be done for the first message of a link until `limit`.
void Transport::Engine::progress(Lock& lock, Incoming& link, Time limit) {
  const std::shared_ptr<Receipt> first = link.queue.front();
  if (first->threaded) {
    patiently(limit, [&](Time until) {
      return changed_.wait_until(
          lock, until, [&] { return lost() || first->message; });
    });
    return;
  }
  if (const Work work = advance(link, *first)) {
    first->awaited = true;
    const bool done = wait_for(lock, work, limit);
    first->awaited = false;
    if (done) {
      first->works.pop_front();
    }
    return;
  }
  pop(link);
}

Outcome Transport::Engine::wait(int64_t ticket, double seconds) {
  Lock lock(mutex_);
  const std::shared_ptr<Receipt> receipt = receipt_of(ticket);
  Incoming& link = incoming(receipt->peer, receipt->channel);
  const Time limit = limit_of(&receipt->since, seconds);
  try {
    while (!receipt->message && !lost() && !stopping_ && Clock::now() < limit) {
      progress(lock, link, limit);
    }
    changed_.wait_until(
        lock, limit, [&] { return !receipt->unposted || lost() || stopping_; });
  } catch (const HeaderError& error) {
    const std::string what = error.what();
    lock.unlock();
    fail_with(broken_protocol(link, what));
    return Outcome::kLost;
  } catch (const std::exception&) {
    lock.unlock();
    fail_with(lost_peer(receipt->peer), receipt->peer);
    return Outcome::kLost;
  }
  if (receipt->message && !receipt->unposted) {
    return Outcome::kDone;
  }
  if (lost() || stopping_) {
    return Outcome::kLost;
  }
  if (!overdue(receipt->since)) {
    return Outcome::kPending;
  }
  lock.unlock();
  fail_with(
      timed_out(false, receipt->channel, receipt->expected, receipt->peer));
  return Outcome::kLost;
}

Message Transport::Engine::take(int64_t ticket) {
  Lock lock(mutex_);
  const auto found = receipts_.find(ticket);
  if (found != receipts_.end() && found->second->message &&
      !found->second->unposted) {
    const std::shared_ptr<Receipt> receipt = std::move(found->second);
    receipts_.erase(found);
    Message message = std::move(*receipt->message);
    lock.unlock();
    take_from_lane(*receipt, message);
    return message;
  }
  TORCH_CHECK_VALUE(
      false,
      "PipelineTransport: expected a ticket whose message has arrived, but "
      "got ",
      ticket,
      " (argument 'ticket')");
}

Transport::Engine::Work Transport::Engine::post_receive(
    const Incoming& link,
    const at::Tensor& bytes,
    int tag) {
  const Unprofiled guard;
  std::vector<at::Tensor> one{bytes};
  return group_->recv(one, static_cast<int>(link.peer), tag);
}

// Does all for a message that needs no waiting; returns what is to be waited
// for, nothing if the message is whole. The caller holds mutex_.
Transport::Engine::Work
Transport::Engine::advance(Incoming& link, Receipt& receipt) {
  while (receipt.works.empty()) {
    switch (receipt.phase) {
      case Phase::kFrame:
        open_frame(link, receipt);
        break;
      case Phase::kHeader:
        open_header(link, receipt);
        break;
      case Phase::kPayload:
        receipt.message = std::move(receipt.arriving);
        return {};
    }
  }
  return receipt.works.front();
}

void Transport::Engine::open_frame(Incoming& link, Receipt& receipt) {
  const auto* frame = receipt.buffer.const_data_ptr<uint8_t>();
  const Header head = decode_fixed(frame);
  if (receipt.channel != Channel::kControl) {
    // Compared before anything is allocated for it. Control messages come
    // before anyone asks.
    check(receipt.expected, head);
  }
  receipt.phase = Phase::kHeader;
  const size_t more = second_frame_bytes(frame);
  if ((head.flags & kTogether) == 0 && more > 0) {
    receipt.second = empty_bytes(more);
    receipt.works.push_back(
        post_receive(link, receipt.second, link.tag + kRestTag));
  }
}

// Takes a small payload out of the frame's buffer, or the offer, or begins to
// receive a payload that was not foretold.
void Transport::Engine::open_header(Incoming& link, Receipt& receipt) {
  receipt.phase = Phase::kPayload;
  const uint8_t flags =
      decode_fixed(receipt.buffer.const_data_ptr<uint8_t>()).flags;
  if ((flags & kTogether) != 0) {
    receipt.arriving = unpack(receipt.buffer);
    link.layout.clear();
    link.surprised = false;
  } else {
    Message message{decode_frames(receipt.buffer, receipt.second), {}};
    link.surprised = (flags & kOffered) == 0;
    if (!link.surprised) {
      if (!same_layout(link.layout, message.header.tensors)) {
        throw HeaderError("header: expected the tensors of the message before");
      }
      message.tensors = std::move(receipt.offer);
    } else {
      for (const TensorMeta& meta : message.header.tensors) {
        message.tensors.push_back(
            meta.on_device ? at::Tensor() : allocate(meta));
        if (meta.travels()) {
          const at::Tensor bytes = payload_bytes(message.tensors.back());
          receipt.works.push_back(
              post_receive(link, bytes, link.tag + kRestTag));
        }
      }
    }
    link.layout = message.header.tensors;
    link.large = true;
    receipt.arriving = std::move(message);
  }
  announce_lane(receipt);
  receipt.offer.clear();
  link.spare.push_back(std::move(receipt.buffer));
}

} // namespace torch_sm3::pipeline
