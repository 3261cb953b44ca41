// SPDX-License-Identifier: Apache-2.0
// How the links of a Transport are lost, and how every rank learns why.
#include <transport/engine.h>

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

std::string Transport::Engine::failure() const {
  const Lock lock(mutex_);
  return failure_;
}

void Transport::Engine::fail_with(const Failure& failure, int64_t except) {
  fail(structure_of(failure), except);
}

void Transport::Engine::fail(const std::string& structure, int64_t except) {
  {
    const Lock lock(mutex_);
    if (lost() || stopping_) {
      return; // the first failure stands
    }
    failure_ = structure;
    for (const Waiting& waiting : waiting_) {
      abort_wait(waiting.work);
    }
    changed_.notify_all();
  }
  Header header;
  header.flags = kAlarm;
  header.structure = structure;
  tell_all(header, except);
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
          sends ? " to receive" : "")};
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
