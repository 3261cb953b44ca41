// SPDX-License-Identifier: Apache-2.0
// How the links of a Transport are lost, and how every rank learns why.
#include <transport/engine.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

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

std::string Transport::Engine::failure() {
  Lock lock(mutex_);
  changed_.wait(
      lock, [&] { return !lost() || !failure_.empty() || stopping_; });
  return failure_;
}

// All ranks are to name one failure, although several may notice it, each in
// its own way, and several may wait in a row for one that is silent. So the hub
// decides, a moment after the first report, by all that were told until then. A
// rank that hears no verdict decides by itself, as all the others then do: the
// hub is the silent one.
void Transport::Engine::fail_with(const Failure& failure, int64_t except) {
  Report report{rank_, failure.awaited, except, structure_of(failure)};
  rank_ == options_.hub ? consider(std::move(report)) : propose(report);
}

void Transport::Engine::fail(const std::string& structure) {
  Report report{rank_, -1, -1, structure};
  rank_ == options_.hub ? consider(std::move(report)) : propose(report);
}

// Ends all waits of this rank; the caller holds mutex_.
void Transport::Engine::lose() {
  lost_ = true;
  for (const Waiting& waiting : waiting_) {
    abort_wait(waiting.work);
  }
  changed_.notify_all();
}

// For the hub.
void Transport::Engine::consider(Report report) {
  const Lock lock(mutex_);
  if (failure_.empty() && !stopping_) {
    reports_.push_back(std::move(report));
    verdict_at_ = verdict_at_.value_or(Clock::now() + kCollect);
    lose();
  }
}

// For the other ranks.
void Transport::Engine::propose(const Report& report) {
  bool gone = report.gone == options_.hub;
  {
    const Lock lock(mutex_);
    gone = gone || incoming(options_.hub, Channel::kControl).left;
    if (!failure_.empty() || stopping_ || (lost() && !gone)) {
      return; // the first report stands
    }
    // What the hub said before it left may still be on its way.
    const Time at =
        Clock::now() + std::min<std::chrono::nanoseconds>(
                           gone ? std::chrono::nanoseconds(kCollect) : kGrace,
                           in_seconds(options_.timeout));
    verdict_at_ = std::min(verdict_at_.value_or(at), at);
    hub_gone_ = hub_gone_ || gone;
    lose();
  }
  if (!gone) {
    Header header;
    header.flags = kReport;
    header.microbatch = static_cast<uint32_t>(report.awaited + 1);
    header.structure = report.structure;
    tell_all(header, -1);
  }
}

// Ends the search for a name.
void Transport::Engine::settle(const std::string& structure, int64_t except) {
  {
    const Lock lock(mutex_);
    if (!failure_.empty() || stopping_) {
      return; // the first verdict stands
    }
    failure_ = structure;
    lose();
  }
  Header header;
  header.flags = kAlarm;
  header.structure = structure;
  tell_all(header, except);
}

// Decides if it is time to.
void Transport::Engine::give_verdict(Lock& lock) {
  if (!verdict_at_ || !failure_.empty() || Clock::now() < *verdict_at_) {
    return;
  }
  const std::string structure = verdict();
  lock.unlock();
  settle(structure, -1);
  lock.lock();
}

// The failure behind all that is known; the caller holds mutex_.
std::string Transport::Engine::verdict() const {
  if (rank_ == options_.hub) {
    return verdict_of_hub();
  }
  return hub_gone_ ? structure_of(lost_peer(options_.hub)) : silence_of_hub();
}

std::string Transport::Engine::silence_of_hub() const {
  Failure failure = lost_peer(options_.hub);
  failure.error_type = "TimeoutError";
  failure.message = c10::str("rank ", options_.hub, " did not answer in time");
  return structure_of(failure);
}

std::string Transport::Engine::verdict_of_hub() const {
  const Report* found = nullptr;
  for (const Report& report : reports_) {
    const auto by = [&](int64_t rank) {
      return std::any_of(
          reports_.begin(), reports_.end(), [&](const Report& other) {
            return other.rank == rank && other.awaited >= 0;
          });
    };
    if (report.gone >= 0 && by(report.gone)) {
      // It reported silence and left without an answer: ours came too late.
      return silence_of_hub();
    }
    if (report.awaited < 0) {
      return report.structure;
    }
    // The one at the end of the row waits for a rank that waits for nobody.
    if (found == nullptr && !by(report.awaited)) {
      found = &report;
    }
  }
  return found != nullptr ? found->structure : reports_.front().structure;
}

// Posts a control message, without a wait, to all who listen to this rank.
void Transport::Engine::tell_all(const Header& header, int64_t except) {
  std::vector<Outgoing*> links;
  {
    const Lock lock(mutex_);
    for (const int64_t peer : control_peers()) {
      if (peer != except && !incoming(peer, Channel::kControl).left) {
        links.push_back(&outgoing(peer, Channel::kControl));
      }
    }
  }
  for (Outgoing* link : links) {
    Header own = header;
    own.message_class = MessageClass::kControl;
    try {
      post(*link, wrap(*link, std::move(own), {}));
    } catch (const std::exception&) {
      continue; // that peer is gone and need not be told
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
          sends ? " to receive" : ""),
      peer};
}

Failure Transport::Engine::broken_protocol(
    const Incoming& link,
    const std::string& what) const {
  const Lock lock(mutex_);
  Failure failure{rank_, 0, 0, "", "ProtocolError", ""};
  std::string expected = "a message";
  if (!link.queue.empty()) {
    const Header& header = link.queue.front()->expected;
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

} // namespace torch_sm3::pipeline
