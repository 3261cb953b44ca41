// SPDX-License-Identifier: Apache-2.0
// What callers of a Transport ask for; links.cpp holds the messages themselves.
#include <engine.h>
#include <payload.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

// How often waits are looked at. A caller with signals to serve waits in slices
// of this order.
constexpr std::chrono::milliseconds kTick{50};

std::chrono::nanoseconds in_seconds(double value) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(std::min(value, 1e9)));
}

std::string action_name(bool sends, MessageClass link_class, const Header& h) {
  if (link_class == MessageClass::kControl) {
    return "";
  }
  const char* direction = link_class == MessageClass::kActivation ? "F" : "B";
  return c10::str(
      sends ? h.source : h.target,
      sends ? "SEND_" : "RECV_",
      direction,
      h.microbatch);
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
    launch(incoming(peer, MessageClass::kControl), &Engine::run_control);
  }
  watcher_ = std::thread([self = shared_from_this()] { self->watch(); });
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

Transport::Engine::Outgoing&
Transport::Engine::outgoing(int64_t peer, MessageClass link_class) {
  std::unique_ptr<Outgoing>& link = outgoing_[{peer, link_class}];
  if (!link) {
    link = std::make_unique<Outgoing>();
    link->peer = peer;
    link->tag = tag(link_class, rank_, peer);
  }
  return *link;
}

Transport::Engine::Incoming&
Transport::Engine::incoming(int64_t peer, MessageClass link_class) {
  std::unique_ptr<Incoming>& link = incoming_[{peer, link_class}];
  if (!link) {
    link = std::make_unique<Incoming>();
    link->peer = peer;
    link->tag = tag(link_class, peer, rank_);
    link->buffer = empty_bytes(kFrameBytes + kSmallPayload);
  }
  return *link;
}

void Transport::Engine::begin(uint64_t step, bool evaluation) {
  const Lock lock(mutex_);
  step_ = step;
  flags_ = evaluation ? kEvaluation : 0;
}

// --- waiting -----------------------------------------------------------------

// Ends the waits of callers that have lasted long enough.
void Transport::Engine::watch() {
  Lock lock(mutex_);
  while (!stopping_) {
    watching_.wait_for(lock, kTick);
    for (const Waiting& waiting : waiting_) {
      if (Clock::now() >= waiting.limit) {
        abort_wait(waiting.work);
      }
    }
  }
}

// Waits for work without the lock; false if it was interrupted.
bool Transport::Engine::wait_for(Lock& lock, const Work& work, Time limit) {
  const auto entry = waiting_.insert(waiting_.end(), {work, limit});
  lock.unlock();
  bool done = false;
  std::exception_ptr error;
  try {
    done = work->wait(kForever);
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  waiting_.erase(entry);
  if (error) {
    std::rethrow_exception(error);
  }
  return done;
}

// When a call of `seconds` ends, or the wait as a whole that began with
// `since`.
Transport::Engine::Time
Transport::Engine::limit_of(std::optional<Time>* since, double seconds) const {
  const Time now = Clock::now();
  *since = since->value_or(now);
  return std::min(
      now + in_seconds(seconds), **since + in_seconds(options_.timeout));
}

bool Transport::Engine::overdue(const std::optional<Time>& since) const {
  return since && Clock::now() - *since >= in_seconds(options_.timeout);
}

// --- sending -----------------------------------------------------------------

// Waits until at most `most` messages of a link are under way.
bool Transport::Engine::make_room(
    Lock& lock,
    Outgoing& link,
    size_t most,
    Time limit) {
  while (link.parcels.size() > most) {
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
    MessageClass link_class,
    Header header,
    const std::vector<at::Tensor>& tensors,
    double seconds) {
  Lock lock(mutex_);
  Outgoing& link = outgoing(peer, link_class);
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
  fail_with(
      {rank_,
       header.source,
       header.microbatch,
       action_name(true, link_class, header),
       "TimeoutError",
       c10::str(
           "rank ",
           rank_,
           " waited ",
           options_.timeout,
           " s for rank ",
           peer,
           " to receive")});
  return Outcome::kLost;
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

// --- receiving ---------------------------------------------------------------

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
  Incoming& link = incoming(peer, link_class);
  link.asked.push_back(std::move(receipt));
  try {
    if (link_class == MessageClass::kControl) {
      match(link);
    } else if (link.asked.size() == 1) {
      post_next(link);
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

// Begins to receive the first message that was asked for.
void Transport::Engine::post_next(Incoming& link) {
  if (link.asked.empty()) {
    return;
  }
  Receipt& receipt = *link.asked.front();
  receipt.frame = post_receive(link, link.buffer);
  receipt.threaded = link.large;
  if (receipt.threaded) {
    link.wake.notify_one();
  }
}

// Does what can be done for the first message of a link until `limit`.
void Transport::Engine::progress(Lock& lock, Incoming& link, Time limit) {
  const std::shared_ptr<Receipt> first = link.asked.front();
  if (first->threaded || !first->frame) {
    changed_.wait_until(lock, limit, [&] { return lost() || first->message; });
    return;
  }
  if (!wait_for(lock, first->frame, limit) || lost() || stopping_) {
    return;
  }
  if (open_frame(link, *first)) {
    link.asked.pop_front();
    post_next(link);
    return;
  }
  // The payload is a transmission of its own; the next ones will be, too, and
  // from now on they move while the caller computes.
  link.large = true;
  first->threaded = true;
  if (!link.thread.joinable()) {
    launch(link, &Engine::run_incoming);
  }
  link.wake.notify_one();
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
  Incoming& link = incoming(receipt->peer, receipt->link_class);
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
      {rank_,
       receipt->expected.target,
       receipt->expected.microbatch,
       action_name(false, receipt->link_class, receipt->expected),
       "TimeoutError",
       c10::str(
           "rank ",
           rank_,
           " waited ",
           options_.timeout,
           " s for rank ",
           receipt->peer)});
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

// --- the end -----------------------------------------------------------------

std::string Transport::Engine::failure() const {
  const Lock lock(mutex_);
  return failure_;
}

void Transport::Engine::fail_with(const Failure& failure, int64_t except) {
  fail(structure_of(failure), except);
}

void Transport::Engine::fail(const std::string& structure, int64_t except) {
  std::vector<Outgoing*> alarms;
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
    for (const Waiting& waiting : waiting_) {
      abort_wait(waiting.work);
    }
    changed_.notify_all();
  }
  for (Outgoing* link : alarms) {
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
    watching_.notify_all();
  }
  for (auto& entry : incoming_) {
    stop(*entry.second);
  }
  if (watcher_.joinable()) {
    watcher_.join();
  }
  const Lock lock(mutex_);
  for (auto& entry : incoming_) {
    entry.second->asked.clear();
  }
  receipts_.clear();
  outgoing_.clear();
  group_.reset();
}

} // namespace torch_sm3::pipeline
