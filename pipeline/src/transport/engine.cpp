// SPDX-License-Identifier: Apache-2.0
// The life of a Transport: links and waits.
#include <transport/engine.h>
#include <transport/payload.h>

#include <algorithm>

namespace torch_sm3::pipeline {
Transport::Engine::Engine(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    TransportOptions options,
    std::shared_ptr<Lanes> lanes)
    : options_(std::move(options)),
      rank_(group->getRank()),
      size_(group->getSize()),
      group_(std::move(group)),
      lanes_(std::move(lanes)) {}

void Transport::Engine::start() {
  const Lock lock(mutex_);
  for (const int64_t peer : control_peers()) {
    launch(incoming(peer, Channel::kControl), &Engine::run_control);
  }
  watcher_ = std::thread([self = shared_from_this()] { self->watch(); });
  if (!options_.link_delay.empty()) {
    delayer_ =
        std::thread([self = shared_from_this()] { self->run_delayed(); });
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

int Transport::Engine::tag(Channel channel, int64_t from, int64_t to) const {
  return static_cast<int>(
      kTags * ((static_cast<int64_t>(channel) * size_ + from) * size_ + to));
}

Transport::Engine::Outgoing&
Transport::Engine::outgoing(int64_t peer, Channel channel) {
  std::unique_ptr<Outgoing>& link = outgoing_[{peer, channel}];
  if (!link) {
    link = std::make_unique<Outgoing>();
    link->peer = peer;
    link->tag = tag(channel, rank_, peer);
    link->foretells = channel != Channel::kControl;
    const auto delay = options_.link_delay.find({rank_, peer});
    if (delay != options_.link_delay.end() && channel != Channel::kControl) {
      link->delay = in_seconds(delay->second);
    }
  }
  return *link;
}

Transport::Engine::Incoming&
Transport::Engine::incoming(int64_t peer, Channel channel) {
  std::unique_ptr<Incoming>& link = incoming_[{peer, channel}];
  if (!link) {
    link = std::make_unique<Incoming>();
    link->peer = peer;
    link->tag = tag(channel, peer, rank_);
  }
  return *link;
}

void Transport::Engine::begin(uint64_t step, bool evaluation) {
  const Lock lock(mutex_);
  step_ = step;
  flags_ = evaluation ? kEvaluation : 0;
}

// Ends the waits of callers that have lasted long enough, and doubt about why
// the links are lost.
void Transport::Engine::watch() {
  Lock lock(mutex_);
  while (!stopping_) {
    watching_.wait_for(lock, kTick);
    for (const Waiting& waiting : waiting_) {
      if (Clock::now() >= waiting.limit) {
        abort_wait(waiting.work);
      }
    }
    give_verdict(lock);
  }
}

// Waits in a way that is given. If that lasts, the peer may wait for us to
// receive what was asked of it, so threads do that meanwhile.
bool Transport::Engine::patiently(
    Time limit,
    const std::function<bool(Time)>& wait) {
  if (wait(std::min(limit, Clock::now() + kTick))) {
    return true;
  }
  if (lost() || stopping_ || Clock::now() >= limit) {
    return false;
  }
  ++stuck_;
  hand_over();
  const bool done = wait(limit);
  --stuck_;
  return done;
}

// What was posted may have made ready a thread of the backend on this core, of
// this rank or of the peer, that preempts nobody (see BatchThreads). Without
// the core now it would wait until the caller's computations have had a slice.
void Transport::Engine::let_others_run() {
  std::this_thread::yield();
}

bool Transport::Engine::wait_for(Lock& lock, const Work& work, Time limit) {
  return patiently(
      limit, [&](Time until) { return wait_once(lock, work, until); });
}

// Waits for work without the lock; false if it was interrupted.
bool Transport::Engine::wait_once(Lock& lock, const Work& work, Time limit) {
  const auto entry = waiting_.insert(waiting_.end(), {work, limit});
  lock.unlock();
  bool done = false;
  std::exception_ptr error;
  try {
    done = wait_to_the_end(work);
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

// Waits for work; false if it was interrupted. With Gloo a wait that is woken
// late throws if the peer has closed the connection meanwhile, even where the
// message came before that: for one that ended well a second wait throws
// nothing. So what a rank said last is heard, however busy the machine is.
bool Transport::Engine::wait_to_the_end(const Work& work) {
  try {
    return work->wait(kForever);
  } catch (const std::exception&) {
    return work->wait(kForever);
  }
}

// Ends a wait. With Gloo what was posted stays and can be waited for again.
void Transport::Engine::abort_wait(const Work& work) {
  try {
    work->abort();
  } catch (const std::exception&) {
    return; // a backend that cannot: the wait ends when the message comes
  }
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

void Transport::Engine::stop(Incoming& link) {
  if (!link.thread.joinable()) {
    return;
  }
  // A wait that starts later sees stopping_; one that runs is aborted, again
  // and again, because an abort may come a moment before its wait.
  const Time give_up = Clock::now() + std::chrono::seconds(2);
  bool finished = false;
  while (!finished && Clock::now() < give_up) {
    {
      const Lock lock(mutex_);
      finished = link.finished;
      link.wake.notify_all();
      if (link.current) {
        abort_wait(link.current);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(finished ? 0 : 1));
  }
  // Not every backend can end a wait; then the thread is left to end by itself.
  finished ? link.thread.join() : link.thread.detach();
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
  if (!was_lost) {
    // The others may be a moment behind, for example tell each other how the
    // last step ended. That this rank leaves is no fault as long as it owes
    // nothing.
    Header header;
    header.flags = kGoodbye;
    tell_all(header, -1);
  }
  // What was sent last may still be on its way: the answer of the hub, or the
  // alarm. After a loss the peer may be gone, so the wait is short.
  flush(was_lost ? 0.5 : 5.0);
  if (lanes_) {
    lanes_->close(std::chrono::milliseconds(was_lost ? 500 : 5000));
  }
  {
    const Lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    watching_.notify_all();
    delaying_.notify_all();
  }
  for (auto& entry : incoming_) {
    stop(*entry.second);
  }
  for (std::thread* thread : {&watcher_, &delayer_}) {
    if (thread->joinable()) {
      thread->join();
    }
  }
  const Lock lock(mutex_);
  for (auto& entry : incoming_) {
    entry.second->queue.clear();
  }
  receipts_.clear();
  by_lane_.clear();
  outgoing_.clear();
  lanes_.reset();
  group_.reset();
}

} // namespace torch_sm3::pipeline
