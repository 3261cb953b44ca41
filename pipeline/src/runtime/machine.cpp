// SPDX-License-Identifier: Apache-2.0
// The loop over a row, its messages, and what follows a failure.
#include <runtime/machine.h>

#include <c10/util/Exception.h>

namespace torch_sm3::pipeline {

Machine::Machine(
    std::shared_ptr<const RankProgram> program,
    Transport* transport,
    uint32_t user_ops)
    : program_(std::move(program)),
      transport_(transport),
      user_ops_(user_ops) {}

void Machine::begin(bool training, std::vector<double> weights) {
  training_ = training;
  weights_ = std::move(weights);
  at_ = 0;
  asked_ = false;
  failure_.reset();
  poison_.reset();
  tickets_.clear();
  forget();
  announce();
  stamps_.assign(ledger_ ? program_->row().size() : 0, {});
}

// Announces all messages of the row, so that none waits for its RECV to leave
// its sender: a failed rank sends and takes as many as another.
void Machine::announce() {
  for (const Action one : program_->row()) {
    if (one.op == Op::kRecvForward || one.op == Op::kRecvBackward) {
      const Way& way = program_->way(one);
      tickets_[key(way, one.microbatch)] = transport_->expect(
          way.peer, way.channel, header(way, one.microbatch));
    }
  }
}

void Machine::forget() {
  request_.clear();
  results_.clear();
  graphs_.clear();
  beside_.reset();
  aside_ = 0;
  forget_watched();
}

Request Machine::resume(std::vector<Packed> answer, double seconds) {
  if (asked_) {
    asked_ = false;
    take_answer(std::move(answer));
    finish();
  }
  while (at_ < program_->row().size()) {
    watch_begin();
    switch (failed() ? pass(seconds) : run(seconds)) {
      case Progress::kNext:
        finish();
        break;
      case Progress::kAgain:
        break;
      case Progress::kAsk:
        asked_ = true;
        return {
            beside_ ? Request::Kind::kPair : Request::Kind::kUser,
            at_,
            failed(),
            std::move(request_)};
      case Progress::kWait:
        return {Request::Kind::kWait, at_, failed(), {}};
      case Progress::kLost:
        return {Request::Kind::kLost, at_, failed(), {}};
    }
  }
  return {Request::Kind::kDone, at_, failed(), {}};
}

void Machine::fail(const std::string& error_type, const std::string& message) {
  TORCH_CHECK(
      at_ < program_->row().size(),
      "PipelineRunner: expected an action that failed, but all are done");
  asked_ = false;
  const auto index = static_cast<int64_t>(current());
  const Action now = action();
  if (now.op >= Op::kReduceGrad) {
    finish(); // no communication of ours belongs to it
  }
  if (failure_) {
    return; // a collective after a failure: the first one is told
  }
  failure_.emplace(
      Failure{
          program_->rank(),
          now.stage,
          now.microbatch,
          program_->schedule().text(now),
          error_type,
          message},
      index);
  forget();
}

void Machine::fail(Failure failure) {
  failure_.emplace(std::move(failure), -1);
  forget();
}

void Machine::abandon(Failure why) {
  failure_.reset();
  poison_ = std::move(why);
  forget();
}

// Goes on to the next action.
void Machine::finish() {
  watch_end();
  at_ += beside_ ? 2 : 1;
  beside_.reset();
}

Header Machine::header(const Way& way, uint32_t microbatch) const {
  Header header;
  header.source = way.source;
  header.target = way.target;
  header.microbatch = microbatch;
  return header;
}

Machine::Progress Machine::run(double seconds) {
  switch (action().op) {
    case Op::kIdle:
      return Progress::kNext;
    case Op::kForward:
      return is_pair() ? pair(seconds) : forward(seconds);
    case Op::kBackward:
    case Op::kBackwardInput:
      return backward(seconds);
    case Op::kBackwardWeight: {
      const auto found = graphs_.find({action().stage, action().microbatch});
      TORCH_INTERNAL_ASSERT(found != graphs_.end(), "W without its I");
      watch_ready({});
      found->second.backward.weight();
      graphs_.erase(found);
      return Progress::kNext;
    }
    case Op::kSendForward:
    case Op::kSendBackward:
      return send(seconds);
    case Op::kRecvForward:
    case Op::kRecvBackward:
      receive();
      return Progress::kNext;
    default:
      return (user_ops_ >> static_cast<uint32_t>(action().op) & 1u) != 0
                 ? Progress::kAsk
                 : Progress::kNext;
  }
}

// Does the communication of an action after a failure, and no more.
Machine::Progress Machine::pass(double seconds) {
  switch (action().op) {
    case Op::kForward:
      return drain(program_->ways(action().stage).values_in, seconds);
    case Op::kBackward:
    case Op::kBackwardInput:
      return drain(program_->ways(action().stage).gradients_in, seconds);
    case Op::kBackwardWeight:
      return Progress::kNext;
    case Op::kSendForward:
    case Op::kSendBackward:
      return send_poison(seconds);
    default:
      return run(seconds);
  }
}

void Machine::receive() {
  const Way& way = program_->way(action());
  transport_->ask(tickets_.at(key(way, action().microbatch)));
  watch_asked(way);
}

Machine::Progress Machine::send(double seconds) {
  const Way& way = program_->way(action());
  const uint32_t i = action().microbatch;
  const auto found = results_.find(key(way, i));
  TORCH_INTERNAL_ASSERT(found != results_.end(), "a SEND before its producer");
  Header head = header(way, i);
  head.structure = found->second.structure;
  const Outcome outcome = transport_->send(
      way.peer, way.channel, std::move(head), found->second.tensors, seconds);
  if (outcome == Outcome::kDone) {
    results_.erase(found);
    left(way);
    watch_sent(way);
    return Progress::kNext;
  }
  return outcome == Outcome::kLost ? Progress::kLost : Progress::kWait;
}

Machine::Progress Machine::send_poison(double seconds) {
  const Way& way = program_->way(action());
  Header head = header(way, action().microbatch);
  head.message_class = MessageClass::kPoison;
  head.structure = structure_of(failure_ ? failure_->first : *poison_);
  const Outcome outcome =
      transport_->send(way.peer, way.channel, std::move(head), {}, seconds);
  return outcome == Outcome::kDone   ? Progress::kNext
         : outcome == Outcome::kLost ? Progress::kLost
                                     : Progress::kWait;
}

// Waits until all that comes from other ranks for the action is here.
Machine::Progress Machine::await(const std::vector<Way>& ways, double seconds) {
  for (const Way& way : ways) {
    const auto ticket = tickets_.find(key(way, action().microbatch));
    if (ticket == tickets_.end()) {
      continue;
    }
    const Outcome outcome = transport_->wait(ticket->second, seconds);
    if (outcome != Outcome::kDone) {
      return outcome == Outcome::kLost ? Progress::kLost : Progress::kWait;
    }
  }
  return Progress::kNext;
}

// Takes a message that has arrived; nothing if it was poison.
std::optional<Message> Machine::take_message(const Way& way) {
  const auto ticket = tickets_.find(key(way, action().microbatch));
  TORCH_INTERNAL_ASSERT(ticket != tickets_.end(), "a consumer before its RECV");
  Message message = transport_->take(ticket->second);
  tickets_.erase(ticket);
  if (message.header.message_class != MessageClass::kPoison) {
    watch_arrived(way, message.tensors);
    return message;
  }
  if (!failed()) {
    poison_ = read_failure(message.header.structure);
    forget();
  }
  return std::nullopt;
}

Machine::Progress Machine::drain(const std::vector<Way>& ways, double seconds) {
  const Progress progress = await(ways, seconds);
  if (progress == Progress::kNext) {
    for (const Way& way : ways) {
      if (tickets_.count(key(way, action().microbatch)) > 0) {
        take_message(way);
      }
    }
  }
  return progress;
}

} // namespace torch_sm3::pipeline
