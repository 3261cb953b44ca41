// SPDX-License-Identifier: Apache-2.0
// What the ranks of a runner tell each other outside the schedule.
#include <runtime/control.h>
#include <transport/values.h>

#include <c10/util/Type.h>

#include <algorithm>
#include <tuple>
#include <typeinfo>

namespace torch_sm3::pipeline {
namespace {

void tell(Transport& transport, int64_t peer, const Packed& value) {
  Header header;
  header.structure = value.structure;
  while (true) {
    const Outcome outcome =
        transport.send(peer, Channel::kControl, header, value.tensors, kSlice);
    if (outcome == Outcome::kLost) {
      throw LinksLost();
    }
    if (outcome == Outcome::kDone) {
      return;
    }
  }
}

c10::IValue hear(Transport& transport, int64_t peer) {
  const int64_t ticket = transport.receive(peer, Channel::kControl, {});
  Outcome outcome = Outcome::kPending;
  while (outcome == Outcome::kPending) {
    outcome = transport.wait(ticket, kSlice);
  }
  if (outcome == Outcome::kLost) {
    throw LinksLost();
  }
  Message message = transport.take(ticket);
  return unpack({message.header.structure, std::move(message.tensors)});
}

std::string in_words(const Failure& failure) {
  const std::string place =
      failure.action.empty() ? "" : " at " + failure.action;
  return c10::str(
      "rank ",
      failure.rank,
      place,
      ": ",
      failure.error_type,
      ": ",
      failure.message);
}

} // namespace

PipelineError::PipelineError(const std::string& text, Failure failure)
    : std::runtime_error(text), failure_(std::move(failure)) {}

PipelineError::~PipelineError() = default;

// Each rank tells the hub, which tells all. Of two ranks each tells the other
// at once, since nobody else has to be heard.
std::vector<c10::IValue> exchange(
    Transport* transport,
    int64_t rank,
    int64_t ranks,
    const c10::IValue& own) {
  std::vector<c10::IValue> all(static_cast<size_t>(ranks));
  all[static_cast<size_t>(rank)] = own;
  if (transport == nullptr) {
    return all;
  }
  const Packed packed = pack(own, "a report to hold");
  if (ranks > 2 && rank != kHub) {
    tell(*transport, kHub, packed);
    return hear(*transport, kHub).toTupleRef().elements().vec();
  }
  if (ranks == 2) {
    tell(*transport, 1 - rank, packed);
  }
  for (int64_t peer = 0; peer < ranks; ++peer) {
    if (peer != rank) {
      all[static_cast<size_t>(peer)] = hear(*transport, peer);
    }
  }
  if (ranks > 2) {
    const Packed answer =
        pack(c10::ivalue::Tuple::create(all), "reports to hold");
    for (int64_t peer = 0; peer < ranks; ++peer) {
      if (peer != rank) {
        tell(*transport, peer, answer);
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

c10::IValue value_of(const RankReport& report) {
  c10::IValue failure;
  if (report.failure) {
    const auto& [what, index] = *report.failure;
    failure = c10::ivalue::Tuple::create({structure_of(what), index});
  }
  return c10::ivalue::Tuple::create(
      {failure, report.had_gradients, report.loss, report.losses});
}

RankReport read_report(const c10::IValue& value) {
  const auto fields = value.toTupleRef().elements().vec();
  RankReport report;
  if (!fields.at(0).isNone()) {
    const auto failure = fields[0].toTupleRef().elements().vec();
    report.failure.emplace(
        read_failure(failure.at(0).toStringRef()), failure.at(1).toInt());
  }
  report.had_gradients = fields.at(1).toBool();
  const auto tensor = [](const c10::IValue& field) {
    return field.isTensor() ? field.toTensor() : at::Tensor();
  };
  report.loss = tensor(fields.at(2));
  report.losses = tensor(fields.at(3));
  return report;
}

void raise_failures(const std::vector<RankReport>& reports) {
  std::vector<std::pair<Failure, int64_t>> failures;
  bool had_gradients = false;
  for (const RankReport& report : reports) {
    had_gradients = had_gradients || report.had_gradients;
    if (report.failure) {
      failures.push_back(*report.failure);
    }
  }
  if (failures.empty()) {
    return;
  }
  std::sort(failures.begin(), failures.end(), [](const auto& a, const auto& b) {
    const auto place = [](const auto& x) {
      return std::tuple(
          x.first.stage, x.first.microbatch, x.second, x.first.rank);
    };
    return place(a) < place(b);
  });
  const Failure& first = failures.front().first;
  // Wrong arguments are wrong arguments on all ranks.
  TORCH_CHECK_VALUE(first.action != kArguments, first.message);
  std::string text = "pipeline: " + in_words(first);
  for (size_t i = 1; i < failures.size(); ++i) {
    text += "; also " + in_words(failures[i].first);
  }
  if (had_gradients) {
    text += "; gradients of earlier steps were lost with those of this one";
  }
  throw PipelineError(text, first);
}

void raise_lost(const Failure& failure) {
  const std::string text = "pipeline: " + in_words(failure);
  if (failure.error_type == "ProtocolError") {
    throw ProtocolError(text, failure);
  }
  throw PipelineError(text, failure);
}

} // namespace torch_sm3::pipeline
