// SPDX-License-Identifier: Apache-2.0
// Messages on the wire, and the threads that receive some of them.
#include <engine.h>
#include <payload.h>

#include <algorithm>
#include <cstring>

namespace torch_sm3::pipeline {
namespace {

size_t payload_size(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0 : tensor.nbytes();
}

size_t payload_size(const std::vector<at::Tensor>& tensors) {
  size_t sum = 0;
  for (const at::Tensor& tensor : tensors) {
    sum += payload_size(tensor);
  }
  return sum;
}

// Reads a message that lies in one piece after a frame that `decode_fixed`
// accepts.
Message unpack(const at::Tensor& buffer) {
  const auto* data = buffer.const_data_ptr<uint8_t>();
  const size_t rest = second_frame_bytes(data);
  if (rest > kSmallPayload) {
    throw HeaderError("header: expected a small message");
  }
  const uint8_t* payload = data + kFrameBytes + rest;
  const uint8_t* end = data + buffer.numel();
  Message message{decode({data, payload}), {}};
  for (const TensorMeta& meta : message.header.tensors) {
    message.tensors.push_back(
        allocate(meta, static_cast<size_t>(end - payload)));
    const at::Tensor& tensor = message.tensors.back();
    if (const size_t size = payload_size(tensor)) {
      std::memcpy(tensor.mutable_data_ptr(), payload, size);
      payload += size;
    }
  }
  return message;
}

void check(const Header& expected, const Header& header) {
  const bool same =
      (header.message_class == expected.message_class ||
       header.message_class == MessageClass::kPoison) &&
      (header.flags & kEvaluation) == (expected.flags & kEvaluation) &&
      header.step == expected.step && header.epoch == expected.epoch &&
      header.microbatch == expected.microbatch &&
      header.source == expected.source && header.target == expected.target;
  if (!same) {
    throw HeaderError(describe(header));
  }
}

} // namespace

int Transport::Engine::tag(MessageClass link_class, int64_t from, int64_t to)
    const {
  return static_cast<int>(
      (static_cast<int64_t>(link_class) * size_ + from) * size_ + to);
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

// --- sending -----------------------------------------------------------------

void Transport::Engine::post(
    Outgoing& link,
    Header header,
    const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    header.tensors.push_back(meta_of(tensor));
  }
  const size_t rest = encode(header).size() - kFrameBytes;
  const bool small = rest + payload_size(tensors) <= kSmallPayload;
  header.flags |= small ? kTogether : 0;
  std::vector<uint8_t> bytes = encode(header);
  std::vector<at::Tensor> payload;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() > 0) {
      payload.push_back(payload_bytes(tensor));
    }
  }
  Parcel parcel;
  if (small) {
    for (const at::Tensor& part : payload) {
      const auto* data = part.const_data_ptr<uint8_t>();
      bytes.insert(bytes.end(), data, data + part.numel());
    }
    parcel.tensors = {as_tensor(bytes.data(), bytes.size())};
  } else {
    parcel.tensors = {as_tensor(bytes.data(), kFrameBytes)};
    if (bytes.size() > kFrameBytes) {
      parcel.tensors.push_back(
          as_tensor(bytes.data() + kFrameBytes, bytes.size() - kFrameBytes));
    }
    parcel.tensors.insert(parcel.tensors.end(), payload.begin(), payload.end());
  }
  const Lock posting(posting_);
  for (const at::Tensor& tensor : parcel.tensors) {
    std::vector<at::Tensor> one{tensor};
    parcel.works.push_back(
        group_->send(one, static_cast<int>(link.peer), link.tag));
  }
  const Lock lock(mutex_);
  link.parcels.push_back(std::move(parcel));
}

// --- receiving ---------------------------------------------------------------

Transport::Engine::Work
Transport::Engine::post_receive(Incoming& link, const at::Tensor& bytes) {
  std::vector<at::Tensor> one{bytes};
  return group_->recv(one, static_cast<int>(link.peer), link.tag);
}

// Takes the message whose frame has arrived in the link's buffer, if it is
// whole. The caller holds mutex_.
bool Transport::Engine::open_frame(Incoming& link, Receipt& receipt) {
  receipt.frame.reset();
  const auto* data = link.buffer.const_data_ptr<uint8_t>();
  const Header head = decode_fixed(data);
  // Compared before anything is allocated for it.
  check(receipt.expected, head);
  if ((head.flags & kTogether) == 0) {
    return false;
  }
  receipt.message = unpack(link.buffer);
  return true;
}

// Receives what follows the frame in the link's buffer; nothing is returned if
// the transport closes. For the link's thread.
std::optional<Message> Transport::Engine::pull_rest(Incoming& link) {
  const auto* data = link.buffer.const_data_ptr<uint8_t>();
  std::vector<uint8_t> bytes(data, data + kFrameBytes);
  if (const size_t more = second_frame_bytes(data)) {
    const at::Tensor frame = empty_bytes(more);
    if (!await(link, post_receive(link, frame))) {
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
          post_receive(link, payload_bytes(message.tensors.back())));
    }
  }
  for (const Work& work : works) {
    if (!await(link, work)) {
      return std::nullopt;
    }
  }
  return message;
}

// --- threads -----------------------------------------------------------------

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
      std::optional<Message> message = pull_rest(link);
      if (!message) {
        return;
      }
      const Lock lock(mutex_);
      receipt->message = std::move(message);
    }
    const Lock lock(mutex_);
    link.asked.pop_front();
    post_next(link);
    changed_.notify_all();
  }
}

// Control messages are received before anyone asks, because an alarm may come
// at any time.
void Transport::Engine::run_control(Incoming& link) {
  while (await(link, post_receive(link, link.buffer))) {
    const auto* data = link.buffer.const_data_ptr<uint8_t>();
    std::optional<Message> message = (decode_fixed(data).flags & kTogether) != 0
                                         ? unpack(link.buffer)
                                         : pull_rest(link);
    if (!message) {
      return;
    }
    if ((message->header.flags & kAlarm) != 0) {
      fail(message->header.structure, link.peer);
      continue;
    }
    const Lock lock(mutex_);
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

// Ends a wait. With Gloo what was posted stays and can be waited for again.
void Transport::Engine::abort_wait(const Work& work) {
  try {
    work->abort();
  } catch (const std::exception&) {
    // A backend that cannot: the wait ends when the message comes.
  }
}

} // namespace torch_sm3::pipeline
