// SPDX-License-Identifier: Apache-2.0
// Messages that a caller receives.
#include <transport/engine.h>
#include <transport/payload.h>

#include <algorithm>

namespace torch_sm3::pipeline {
int64_t
Transport::Engine::receive(int64_t peer, Channel channel, Header expected) {
  Lock lock(mutex_);
  const int64_t ticket = next_ticket_++;
  auto receipt = std::make_shared<Receipt>();
  expected.message_class = class_of(channel);
  expected.step = step_;
  expected.flags = flags_;
  receipt->peer = peer;
  receipt->channel = channel;
  receipt->expected = std::move(expected);
  receipts_[ticket] = receipt;
  if (lost() || stopping_) {
    return ticket;
  }
  Incoming& link = incoming(peer, channel);
  link.asked.push_back(std::move(receipt));
  try {
    if (channel == Channel::kControl) {
      match(link);
      const bool never = link.left && !link.asked.empty();
      lock.unlock();
      if (never) {
        fail_with(lost_peer(peer), peer);
      }
      return ticket;
    }
    post_frames(link);
    if (link.asked.size() == 1) {
      next_message(link);
    }
  } catch (const HeaderError& error) {
    const std::string what = error.what();
    lock.unlock();
    fail_with(broken_protocol(link, what));
  } catch (const std::exception&) {
    lock.unlock();
    fail_with(lost_peer(peer), peer);
  }
  return ticket;
}

at::Tensor Transport::Engine::take_buffer(Incoming& link) {
  if (link.spare.empty()) {
    return empty_bytes(kFrameBytes + kSmallPayload);
  }
  at::Tensor buffer = std::move(link.spare.back());
  link.spare.pop_back();
  return buffer;
}

// Begins to receive the frames of as many messages as may be under way, so that
// a message leaves its sender even while its receiver computes or waits for
// something else.
void Transport::Engine::post_frames(Incoming& link) {
  const size_t most =
      std::min(link.asked.size(), static_cast<size_t>(options_.max_pending));
  for (size_t i = 0; i < most; ++i) {
    Receipt& receipt = *link.asked[i];
    if (!receipt.posted) {
      receipt.posted = true;
      receipt.buffer = take_buffer(link);
      receipt.frame = post_receive(link, receipt.buffer, link.tag);
    }
  }
}

// Decides who receives the first message of a link.
void Transport::Engine::next_message(Incoming& link) {
  if (link.asked.empty()) {
    return;
  }
  link.asked.front()->threaded = link.large || stuck_ > 0;
  if (!link.asked.front()->threaded) {
    return;
  }
  if (!link.thread.joinable()) {
    launch(link, &Engine::run_incoming);
  }
  link.wake.notify_one();
}

// Lets the threads receive what was asked for, while a caller waits for another
// thing: its peer may wait for one of these messages to leave.
void Transport::Engine::hand_over() {
  for (auto& entry : incoming_) {
    Incoming& link = *entry.second;
    if (entry.first.second != Channel::kControl && !link.asked.empty() &&
        !link.asked.front()->threaded && !link.asked.front()->awaited) {
      next_message(link);
    }
  }
}

// Does what can be done for the first message of a link until `limit`.
void Transport::Engine::progress(Lock& lock, Incoming& link, Time limit) {
  const std::shared_ptr<Receipt> first = link.asked.front();
  if (first->threaded || !first->frame) {
    patiently(limit, [&](Time until) {
      return changed_.wait_until(
          lock, until, [&] { return lost() || first->message; });
    });
    return;
  }
  first->awaited = true;
  const bool done = wait_for(lock, first->frame, limit);
  first->awaited = false;
  if (!done || lost() || stopping_) {
    return;
  }
  if (open_frame(link, *first)) {
    link.asked.pop_front();
    post_frames(link);
    next_message(link);
    return;
  }
  // The payload is a transmission of its own; the next ones will be, too, and
  // from now on they move while the caller computes.
  link.large = true;
  next_message(link);
}

Outcome Transport::Engine::wait(int64_t ticket, double seconds) {
  Lock lock(mutex_);
  const auto found = receipts_.find(ticket);
  TORCH_CHECK_VALUE(
      found != receipts_.end(),
      "PipelineTransport: expected a ticket of receive, but got ",
      ticket,
      " (argument 'ticket')");
  const std::shared_ptr<Receipt> receipt = found->second;
  Incoming& link = incoming(receipt->peer, receipt->channel);
  const Time limit = limit_of(&receipt->since, seconds);
  try {
    while (!receipt->message && !lost() && Clock::now() < limit) {
      progress(lock, link, limit);
    }
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
  if (receipt->message) {
    return Outcome::kDone;
  }
  if (lost()) {
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
  const Lock lock(mutex_);
  const auto found = receipts_.find(ticket);
  if (found != receipts_.end() && found->second->message) {
    Message message = std::move(*found->second->message);
    receipts_.erase(found);
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
  std::vector<at::Tensor> one{bytes};
  return group_->recv(one, static_cast<int>(link.peer), tag);
}

// Takes the message whose frame has arrived, if it is whole. The caller holds
// mutex_.
bool Transport::Engine::open_frame(Incoming& link, Receipt& receipt) {
  receipt.frame.reset();
  const Header head = decode_fixed(receipt.buffer.const_data_ptr<uint8_t>());
  // Compared before anything is allocated for it.
  check(receipt.expected, head);
  if ((head.flags & kTogether) == 0) {
    return false;
  }
  receipt.message = unpack(receipt.buffer);
  link.spare.push_back(std::move(receipt.buffer));
  return true;
}

} // namespace torch_sm3::pipeline
