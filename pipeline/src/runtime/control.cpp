// SPDX-License-Identifier: Apache-2.0
// What the ranks of a runner tell each other outside the schedule.
#include <runtime/control.h>

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <typeinfo>

namespace torch_sm3::pipeline {

void send_value(
    Transport& transport,
    int64_t peer,
    Channel channel,
    Header header,
    const Packed& value) {
  header.structure = value.structure;
  while (true) {
    const Outcome outcome =
        transport.send(peer, channel, header, value.tensors, kSlice);
    if (outcome == Outcome::kLost) {
      throw LinksLost();
    }
    if (outcome == Outcome::kDone) {
      return;
    }
  }
}

c10::IValue receive_value(
    Transport& transport,
    int64_t peer,
    Channel channel,
    const Header& expected,
    Interrupts* interrupts) {
  const int64_t ticket = transport.receive(peer, channel, expected);
  Outcome outcome = Outcome::kPending;
  while (outcome == Outcome::kPending) {
    outcome = transport.wait(ticket, kSlice);
    if (outcome == Outcome::kPending && interrupts != nullptr &&
        interrupts->take()) {
      throw Interrupted();
    }
  }
  if (outcome == Outcome::kLost) {
    throw LinksLost();
  }
  Message message = transport.take(ticket);
  return unpack({message.header.structure, std::move(message.tensors)});
}

// Each rank tells the hub, which tells all. Of two ranks each tells the other
// at once, since nobody else has to be heard.
std::vector<c10::IValue> exchange(
    Transport* transport,
    int64_t rank,
    int64_t ranks,
    const c10::IValue& own,
    Interrupts* interrupts) {
  std::vector<c10::IValue> all(static_cast<size_t>(ranks));
  all[static_cast<size_t>(rank)] = own;
  if (transport == nullptr) {
    return all;
  }
  const auto tell = [&](int64_t peer, const Packed& value) {
    send_value(*transport, peer, Channel::kControl, {}, value);
  };
  const auto hear = [&](int64_t peer) {
    return receive_value(*transport, peer, Channel::kControl, {}, interrupts);
  };
  const Packed packed = pack(own, "a report to hold");
  if (ranks > 2 && rank != kHub) {
    tell(kHub, packed);
    return hear(kHub).toTupleRef().elements().vec();
  }
  if (ranks == 2) {
    tell(1 - rank, packed);
  }
  for (int64_t peer = 0; peer < ranks; ++peer) {
    if (peer != rank) {
      all[static_cast<size_t>(peer)] = hear(peer);
    }
  }
  if (ranks > 2) {
    const Packed answer =
        pack(c10::ivalue::Tuple::create(all), "reports to hold");
    for (int64_t peer = 0; peer < ranks; ++peer) {
      if (peer != rank) {
        tell(peer, answer);
      }
    }
  }
  return all;
}

std::string type_of(const std::exception& error) {
  return c10::demangle(typeid(error).name());
}

std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace()
                                : error.what();
}

} // namespace torch_sm3::pipeline
