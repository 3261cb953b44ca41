// SPDX-License-Identifier: Apache-2.0
// A forward and the backward beside it in one call.
#include <runtime/machine.h>

#include <c10/util/Exception.h>

namespace torch_sm3::pipeline {
namespace {

// Makes the backward the action at hand.
class Ahead {
 public:
  explicit Ahead(size_t* at) : at_(at) {
    ++*at_;
  }
  ~Ahead() {
    --*at_;
  }
  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;

 private:
  size_t* at_;
};

} // namespace

// Whether the forward at hand and the backward beside it are to be one call. No
// schedule that can run pairs a backward with a forward that it needs.
bool Machine::is_pair() const {
  const auto& row = program_->row();
  return (action().flags & kPaired) != 0 && at_ + 1 < row.size() &&
         fused_.count(action().stage) > 0 &&
         gives_input_gradient(row[at_ + 1].op);
}

// As `forward`, once what the backward beside it needs is here as well.
Machine::Progress Machine::pair(double seconds) {
  Progress progress = Progress::kNext;
  {
    const Ahead ahead(&at_);
    progress = await(gradients_in(), seconds);
  }
  std::vector<Incoming> incoming;
  if (progress == Progress::kNext) {
    progress =
        collect(program_->ways(action().stage).values_in, seconds, &incoming);
  }
  std::vector<Incoming> gradients;
  if (progress == Progress::kNext) {
    const Ahead ahead(&at_);
    progress = collect(gradients_in(), seconds, &gradients);
  }
  if (progress != Progress::kNext) {
    return progress;
  }
  watch_ready(incoming);
  enter(std::move(incoming));
  beside_.emplace(Beside{std::move(gradients)});
  return Progress::kAsk;
}

void Machine::overlap() {
  TORCH_CHECK(
      beside_ && !beside_->running && !beside_->done,
      "PipelineRunner: expected one call of backward in a stage that runs a "
      "forward beside it, but got another");
  const Ahead ahead(&at_);
  beside_->running = true;
  run_backward(beside_->incoming);
  beside_->running = false;
  beside_->done = true;
}

// Goes on behind the backward. One call is one span, which tells readers of a
// trace that the halves were not alone.
void Machine::finish_pair() {
  beside_.reset();
  if (ledger_) {
    const int64_t made = stamps_[at_].made;
    stamps_[at_] = stamps_[at_ - 1];
    stamps_[at_].made = made;
    if (action().op == Op::kBackward) {
      ledger_->settle(cell());
    }
  }
  ++at_;
}

} // namespace torch_sm3::pipeline
