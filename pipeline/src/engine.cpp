// SPDX-License-Identifier: Apache-2.0
// What callers of a Transport ask for; links.cpp holds what its threads do.
#include <engine.h>
#include <payload.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

std::chrono::duration<double> in_seconds(double value) {
  return std::chrono::duration<double>(value);
}

std::string action_name(bool sends, MessageClass link_class, const Header& h) {
  if (link_class == MessageClass::kControl) {
    return "";
  }
  const char* direction = link_class == MessageClass::kActivation ? "F" : "B";
  return std::to_string(sends ? h.source : h.target) +
         (sends ? "SEND_" : "RECV_") + direction + std::to_string(h.microbatch);
}

} // namespace

Transport::Engine::Engine(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    TransportOptions options)
    : options_(std::move(options)),
      rank_(group->getRank()),
      size_(group->getSize()),
      group_(std::move(group)) {}

void Transport::Engine::start() {
  const Lock lock(mutex_);
  for (const int64_t peer : control_peers()) {
    outgoing(peer, MessageClass::kControl);
    incoming(peer, MessageClass::kControl);
  }
}

std::vector<int64_t> Transport::Engine::control_peers() const {
  std::vector<int64_t> peers;
  for (int64_t peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && (rank_ == options_.hub || peer == options_.hub)) {
      peers.push_back(peer);
    }
  }
  return peers;
}

void Transport::Engine::begin(uint64_t step, bool evaluation) {
  const Lock lock(mutex_);
  step_ = step;
  flags_ = evaluation ? kEvaluation : 0;
}

Outcome Transport::Engine::send(
    int64_t peer,
    MessageClass link_class,
    Header header,
    const std::vector<at::Tensor>& tensors,
    double seconds) {
  Lock lock(mutex_);
  if (lost()) {
    return Outcome::kLost;
  }
  Link& link = outgoing(peer, link_class);
  const auto has_room = [&] {
    return static_cast<int64_t>(link.parcels.size()) < options_.max_pending;
  };
  if (!has_room()) {
    const auto now = Clock::now();
    link.full_since = link.full_since.value_or(now);
    const auto left = in_seconds(options_.timeout) - (now - *link.full_since);
    changed_.wait_for(
        lock,
        std::min<std::chrono::duration<double>>(in_seconds(seconds), left),
        [&] { return lost() || has_room(); });
    if (!lost() && !has_room()) {
      if (Clock::now() - *link.full_since < in_seconds(options_.timeout)) {
        return Outcome::kPending;
      }
      lock.unlock();
      fail_with(
          {rank_,
           header.source,
           header.microbatch,
           action_name(true, link_class, header),
           "TimeoutError",
           "rank " + std::to_string(rank_) + " waited " +
               c10::str(options_.timeout) + " s for rank " +
               std::to_string(peer) + " to receive"});
      return Outcome::kLost;
    }
    if (lost()) {
      return Outcome::kLost;
    }
    link.full_since.reset();
  }
  header.step = step_;
  header.flags = flags_;
  lock.unlock();
  try {
    post(link, std::move(header), tensors);
  } catch (const c10::TypeError&) {
    throw;
  } catch (const HeaderError& error) {
    TORCH_CHECK_VALUE(false, error.what());
  } catch (const std::exception&) {
    fail_with(lost_peer(peer), peer);
    return Outcome::kLost;
  }
  return Outcome::kDone;
}

int64_t Transport::Engine::receive(
    int64_t peer,
    MessageClass link_class,
    Header expected) {
  Lock lock(mutex_);
  const int64_t ticket = next_ticket_++;
  auto receipt = std::make_shared<Receipt>();
  expected.message_class = link_class;
  expected.step = step_;
  expected.flags = flags_;
  receipt->peer = peer;
  receipt->link_class = link_class;
  receipt->expected = std::move(expected);
  receipts_[ticket] = receipt;
  if (lost() || stopping_) {
    return ticket;
  }
  Link& link = incoming(peer, link_class);
  link.asked.push_back(std::move(receipt));
  link.wake.notify_one();
  try {
    match(link);
  } catch (const HeaderError& error) {
    lock.unlock();
    fail_with(broken_protocol(link, error.what()));
  }
  return ticket;
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
  const auto now = Clock::now();
  receipt->since = receipt->since.value_or(now);
  const auto left = in_seconds(options_.timeout) - (now - *receipt->since);
  changed_.wait_for(
      lock,
      std::min<std::chrono::duration<double>>(in_seconds(seconds), left),
      [&] { return lost() || receipt->message; });
  if (receipt->message) {
    return Outcome::kDone;
  }
  if (lost()) {
    return Outcome::kLost;
  }
  if (Clock::now() - *receipt->since < in_seconds(options_.timeout)) {
    return Outcome::kPending;
  }
  lock.unlock();
  fail_with(
      {rank_,
       receipt->expected.target,
       receipt->expected.microbatch,
       action_name(false, receipt->link_class, receipt->expected),
       "TimeoutError",
       "rank " + std::to_string(rank_) + " waited " +
           c10::str(options_.timeout) + " s for rank " +
           std::to_string(receipt->peer)});
  return Outcome::kLost;
}

Message Transport::Engine::take(int64_t ticket) {
  const Lock lock(mutex_);
  const auto found = receipts_.find(ticket);
  TORCH_CHECK_VALUE(
      found != receipts_.end() && found->second->message,
      "PipelineTransport: expected a ticket whose message has arrived, but "
      "got ",
      ticket,
      " (argument 'ticket')");
  Message message = std::move(*found->second->message);
  receipts_.erase(found);
  return message;
}

bool Transport::Engine::idle() const {
  return std::all_of(outgoing_.begin(), outgoing_.end(), [](const auto& entry) {
    return entry.second->parcels.empty() || entry.second->finished;
  });
}

bool Transport::Engine::flush(double seconds) {
  Lock lock(mutex_);
  return changed_.wait_for(lock, in_seconds(seconds), [&] { return idle(); });
}

std::string Transport::Engine::failure() const {
  const Lock lock(mutex_);
  return failure_;
}

void Transport::Engine::fail_with(const Failure& failure, int64_t except) {
  fail(structure_of(failure), except);
}

void Transport::Engine::fail(const std::string& structure, int64_t except) {
  std::vector<Link*> alarms;
  {
    const Lock lock(mutex_);
    if (lost() || stopping_) {
      return; // the first failure stands
    }
    failure_ = structure;
    for (const int64_t peer : control_peers()) {
      if (peer != except) {
        alarms.push_back(&outgoing(peer, MessageClass::kControl));
      }
    }
    changed_.notify_all();
  }
  for (Link* link : alarms) {
    Header header;
    header.message_class = MessageClass::kControl;
    header.flags = kAlarm;
    header.structure = structure;
    try {
      post(*link, std::move(header), {});
    } catch (const std::exception&) {
      // That peer is gone too; it needs no alarm.
    }
  }
}

void Transport::Engine::close() {
  bool was_lost = false;
  {
    const Lock lock(mutex_);
    if (stopping_) {
      return;
    }
    was_lost = lost();
  }
  // What was sent last may still be on its way: the answer of the hub, or the
  // alarm. After a loss the peer may be gone, so the wait is short.
  flush(was_lost ? 0.5 : 5.0);
  {
    const Lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  for (auto* links : {&outgoing_, &incoming_}) {
    for (auto& entry : *links) {
      stop(*entry.second);
    }
  }
  const Lock lock(mutex_);
  group_.reset();
}

} // namespace torch_sm3::pipeline
