// SPDX-License-Identifier: Apache-2.0
#include <transport/engine.h>

namespace torch_sm3::pipeline {
namespace {

std::string code(int64_t value) {
  return c10::str("i", value, ";");
}

std::string code(const std::string& value) {
  return c10::str("s", value.size(), ":", value);
}

} // namespace

std::string structure_of(const Failure& failure) {
  return c10::str(
      "(",
      code(failure.rank),
      code(failure.stage),
      code(failure.microbatch),
      code(failure.action),
      code(failure.error_type),
      code(failure.message),
      ")");
}

Transport::Transport(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    TransportOptions options,
    std::shared_ptr<Lanes> lanes)
    : engine_(
          std::make_shared<Engine>(
              std::move(group),
              std::move(options),
              std::move(lanes))) {
  engine_->start();
}

Transport::~Transport() {
  close();
}

void Transport::begin(uint64_t step, bool evaluation) {
  engine_->begin(step, evaluation);
}

Outcome Transport::send(
    int64_t peer,
    Channel channel,
    Header header,
    const std::vector<at::Tensor>& tensors,
    double seconds) {
  return engine_->send(peer, channel, std::move(header), tensors, seconds);
}

int64_t Transport::expect(int64_t peer, Channel channel, Header expected) {
  return engine_->expect(peer, channel, std::move(expected));
}

void Transport::ask(int64_t ticket) {
  engine_->ask(ticket);
}

int64_t Transport::receive(int64_t peer, Channel channel, Header expected) {
  const int64_t ticket = engine_->expect(peer, channel, std::move(expected));
  engine_->ask(ticket);
  return ticket;
}

Outcome Transport::wait(int64_t ticket, double seconds) {
  return engine_->wait(ticket, seconds);
}

Message Transport::take(int64_t ticket) {
  return engine_->take(ticket);
}

int64_t Transport::pending() const {
  return engine_->pending();
}

bool Transport::flush(double seconds) {
  return engine_->flush(seconds);
}

void Transport::fail(const std::string& structure) {
  engine_->fail(structure);
}

std::string Transport::failure() const {
  return engine_->failure();
}

void Transport::close() {
  engine_->close();
}

} // namespace torch_sm3::pipeline
