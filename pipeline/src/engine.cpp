// SPDX-License-Identifier: Apache-2.0
// The life of a Transport: links, waits and failures.
#include <engine.h>
#include <payload.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

// How often waits are looked at. A caller with signals to serve waits in slices
// of this order.
constexpr std::chrono::milliseconds kTick{50};

std::string action_name(bool sends, Channel channel, const Header& header) {
  if (channel == Channel::kControl) {
    return "";
  }
  const bool forward = header.source < header.target;
  std::string text = c10::str(
      sends ? header.source : header.target,
      sends ? "SEND_" : "RECV_",
      forward ? "F" : "B",
      header.microbatch);
  if (class_of(channel) == MessageClass::kSkip) {
    text += sends ? c10::str(">", header.target) : c10::str("<", header.source);
  }
  return text;
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
      (static_cast<int64_t>(channel) * size_ + from) * size_ + to);
}

Transport::Engine::Outgoing&
Transport::Engine::outgoing(int64_t peer, Channel channel) {
  std::unique_ptr<Outgoing>& link = outgoing_[{peer, channel}];
  if (!link) {
    link = std::make_unique<Outgoing>();
    link->peer = peer;
    link->tag = tag(channel, rank_, peer);
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
    link->buffer = empty_bytes(kFrameBytes + kSmallPayload);
  }
  return *link;
}

void Transport::Engine::begin(uint64_t step, bool evaluation) {
  const Lock lock(mutex_);
  step_ = step;
  flags_ = evaluation ? kEvaluation : 0;
}

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
        alarms.push_back(&outgoing(peer, Channel::kControl));
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
      continue; // that peer is gone too and needs no alarm
    }
  }
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
      c10::str("rank ", peer, " ended or left the pipeline")};
}

Failure Transport::Engine::timed_out(
    bool sends,
    Channel channel,
    const Header& header,
    int64_t peer) const {
  return {
      rank_,
      sends ? header.source : header.target,
      header.microbatch,
      action_name(sends, channel, header),
      "TimeoutError",
      c10::str(
          "rank ",
          rank_,
          " waited ",
          options_.timeout,
          " s for rank ",
          peer,
          sends ? " to receive" : "")};
}

Failure Transport::Engine::broken_protocol(
    const Incoming& link,
    const std::string& what) const {
  const Lock lock(mutex_);
  Failure failure{rank_, 0, 0, "", "ProtocolError", ""};
  std::string expected = "a message";
  if (!link.asked.empty()) {
    const Header& header = link.asked.front()->expected;
    failure.stage = header.target;
    failure.microbatch = header.microbatch;
    expected = describe(header);
  }
  failure.message = c10::str(
      "rank ",
      rank_,
      " expected ",
      expected,
      ", but rank ",
      link.peer,
      " sent another message: ",
      what);
  return failure;
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
  // What was sent last may still be on its way: the answer of the hub, or the
  // alarm. After a loss the peer may be gone, so the wait is short.
  flush(was_lost ? 0.5 : 5.0);
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
    entry.second->asked.clear();
  }
  receipts_.clear();
  outgoing_.clear();
  group_.reset();
}

} // namespace torch_sm3::pipeline
