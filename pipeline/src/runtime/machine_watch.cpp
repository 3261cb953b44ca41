// SPDX-License-Identifier: Apache-2.0
// What traces and profilers see of a Machine.
#include <runtime/machine.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <string_view>

namespace torch_sm3::pipeline {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

} // namespace

std::vector<at::Tensor>
Machine::tensors_of(const std::vector<Incoming>& incoming) {
  std::vector<at::Tensor> all;
  for (const Incoming& one : incoming) {
    const auto& tensors = one.value.tensors;
    all.insert(all.end(), tensors.begin(), tensors.end());
  }
  return all;
}

void Machine::trace(
    int64_t max_pending,
    std::map<uint16_t, std::vector<at::Tensor>> weights) {
  ledger_ = std::make_unique<Ledger>(max_pending);
  watched_weights_ = std::move(weights);
}

void Machine::forget_watched() {
  asked_at_.clear();
  if (ledger_) {
    ledger_->clear();
  }
}

// Looked at again while the action waits.
void Machine::watch_begin() {
  if (!span_) {
    if (auto callbacks =
            at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      span_.emplace(std::move(*callbacks));
      const std::string name =
          "torch_sm3.pipeline " + program_->schedule().text(action());
      span_->before(std::string_view(name));
    }
  }
  if (ledger_ && stamps_[current()].begin == 0) {
    stamps_[current()].begin = now_ns();
  }
}

// A computation has all it needs.
void Machine::watch_ready(const std::vector<Incoming>& incoming) {
  if (!ledger_) {
    return;
  }
  if (action().op != Op::kForward && aside_ == 0) {
    watch_kept();
  }
  ledger_->open(cell(), tensors_of(incoming));
  stamps_[current()].ready = now_ns();
}

// What the backward beside a forward needs is here from before the forward on.
void Machine::watch_beside(const std::vector<Incoming>& incoming) {
  if (ledger_) {
    watch_kept();
    ledger_->hold(cell(), tensors_of(incoming));
  }
}

void Machine::watch_kept() {
  const Ledger::Kept kept = ledger_->kept(cell());
  stamps_[current()].kept = kept.bytes;
  stamps_[current()].shared = kept.shared;
}

void Machine::watch_end() {
  span_.reset();
  watch_stop();
  if (ledger_ && beside_) {
    // One action, as far as memory goes.
    stamps_[at_ + 1].live = stamps_[at_].live;
  }
}

void Machine::watch_stop() {
  if (!ledger_) {
    return;
  }
  Stamp& stamp = stamps_[current()];
  stamp.end = now_ns();
  stamp.ready = stamp.ready == 0 ? stamp.begin : stamp.ready;
  if (ledger_->is_open()) {
    stamp.peak = std::max(stamp.peak, ledger_->close());
    const Op op = action().op;
    if (op == Op::kBackward || op == Op::kBackwardWeight || !training_) {
      ledger_->settle(cell());
    }
  }
  stamp.live = ledger_->live();
  stamp.peak = std::max(stamp.peak, stamp.live);
  stamp.pending = transport_ == nullptr ? 0 : transport_->pending();
}

// A forward lets the backward beside it run, which is in its call and in its
// span.
void Machine::watch_aside() {
  if (ledger_) {
    stamps_[at_].peak = ledger_->close();
    stamps_[at_ + 1].begin = now_ns();
  }
}

void Machine::watch_again() {
  if (ledger_) {
    ledger_->open(cell(), {});
  }
}

void Machine::watch_asked(const Way& way) {
  if (ledger_) {
    asked_at_[key(way, action().microbatch)] = current();
  }
}

// Only now is known what the actions since the RECV had in use.
void Machine::watch_arrived(
    const Way& way,
    const std::vector<at::Tensor>& tensors) {
  if (!ledger_ || failed()) {
    return;
  }
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  const auto asked = asked_at_.find(key(way, action().microbatch));
  if (asked == asked_at_.end()) {
    return;
  }
  for (size_t index = asked->second; index < current(); ++index) {
    stamps_[index].live += bytes;
    stamps_[index].peak += bytes;
  }
  asked_at_.erase(asked);
}

void Machine::watch_made(
    const Way& way,
    const std::vector<at::Tensor>& tensors) {
  if (ledger_) {
    const Key message = key(way, action().microbatch);
    ledger_->made(message, cell(), tensors);
    stamps_[current()].made += ledger_->bytes_of(message);
  }
}

// The step keeps its losses to its end, and the factors of their gradients are
// no activations either.
void Machine::watch_loss(const std::vector<Packed>& answer) {
  if (!ledger_) {
    return;
  }
  for (const Packed& one : answer) {
    for (const at::Tensor& tensor : one.tensors) {
      ledger_->drop(cell(), tensor);
    }
  }
  const auto graph = graphs_.find(cell());
  if (graph != graphs_.end() && graph->second.seed.defined()) {
    ledger_->drop(cell(), graph->second.seed);
  }
}

void Machine::watch_used(const Way& way) {
  if (ledger_) {
    ledger_->used(key(way, action().microbatch));
  }
}

void Machine::watch_sent(const Way& way) {
  if (ledger_) {
    const Key message = key(way, action().microbatch);
    stamps_[current()].made = ledger_->bytes_of(message);
    ledger_->sent(message, way.peer);
  }
}

// A weight may have its first gradient since.
void Machine::watch_gradients() {
  const auto weights = watched_weights_.find(action().stage);
  if (!ledger_ || weights == watched_weights_.end()) {
    return;
  }
  for (const at::Tensor& weight : weights->second) {
    if (weight.grad().defined()) {
      ledger_->drop(cell(), weight.grad());
    }
  }
}

} // namespace torch_sm3::pipeline
