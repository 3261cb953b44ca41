// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <runtime/ledger.h>
#include <runtime/rank_program.h>
#include <transport/values.h>

#include <torch_sm3/pipeline/backward.h>
#include <torch_sm3/pipeline/transport.h>

#include <ATen/record_function.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace torch_sm3::pipeline {

// How a run stands when it gives control back.
struct Request {
  enum class Kind : int64_t {
    kWait = 0, // a message has not come yet: resume again
    kUser = 1, // user code of the action is due
    kDone = 2,
    kLost = 3, // the links are lost: see Transport::failure
    kPair = 4, // as kUser, and the backward beside the forward: `overlap`
  };
  Kind kind = Kind::kDone;
  size_t index = 0; // of the action in the row
  // This rank failed or was poisoned: take part in a collective without
  // computing.
  bool failed = false;
  // Of a forward: the value of the stage before, unless it is the first stage,
  // then that of each route to it.
  std::vector<Packed> values;
};

// Runs the row of one rank, step after step, and gives control back whenever
// code of the user is due, or a message that has not come. It knows nothing of
// modules, losses or languages: each face drives it with its own.
//
// The answer to a forward is the stage's value, then that of each of its
// routes; of the last stage it is the loss, or None. The answer to anything
// else is empty. An exception of user code, or out of `resume` itself (a hook
// in a backward), is told by `fail`. Then the run sends poison in place of
// every message that it owes and takes every message that it is owed, without
// computing, so that no neighbour waits for ever and the links are as they were
// before the step.
class Machine {
 public:
  // `transport` may be null for one rank. `user_ops` has bit `op` set for the
  // operations other than F that the face wants to see; the others do nothing.
  Machine(
      std::shared_ptr<const RankProgram> program,
      Transport* transport,
      uint32_t user_ops);

  // Whether a stage's backwards run in two parts where the row says so.
  void set_split(uint16_t stage, Split split) {
    splits_[stage] = split;
  }

  // Whether the forwards of a stage and the backwards paired with them are one
  // call each.
  void set_fused(uint16_t stage) {
    fused_.insert(stage);
  }

  // Begins a step, or an eval if not `training`; the transport must have begun.
  // `weights` are the factors of the microbatches' losses in the gradients, for
  // the rank of the last stage.
  void begin(bool training, std::vector<double> weights);

  // Goes on with the answer to the last request until there is another one;
  // waits for a message no longer than `seconds`.
  Request resume(std::vector<Packed> answer, double seconds);

  // Runs the backward beside the forward of a kPair request, once and before
  // its answer; what it needs is here.
  void overlap();

  // Notes that the action at hand failed.
  void fail(const std::string& error_type, const std::string& message);
  // Notes a failure of the rank before its first action.
  void fail(Failure failure);
  // Gives the run up although nothing failed, since the step begins anew: the
  // rest of the row is communication only.
  void abandon(Failure why);

  // What is noted of an action.
  struct Stamp {
    // When it began, had all it needed and ended, in nanoseconds of the steady
    // clock.
    int64_t begin = 0;
    int64_t ready = 0;
    int64_t end = 0;
    int64_t live = 0;    // bytes in use after it, see Ledger
    int64_t pending = 0; // messages that may be under way after it
    int64_t peak = 0;    // most bytes in use meanwhile
    // Bytes of the messages that a computation made, or of the one that left.
    int64_t made = 0;
    // What a backward found kept of its stage and microbatch: see
    // Ledger::Kept.
    int64_t kept = 0;
    int64_t shared = 0;
  };
  // Stamps later runs.
  //
  // \param max_pending messages of a link that may be under way
  // \param weights     of each stage; their gradients are no activations
  void trace(
      int64_t max_pending,
      std::map<uint16_t, std::vector<at::Tensor>> weights);
  // One for each action of the last run; none without `trace`.
  const std::vector<Stamp>& stamps() const {
    return stamps_;
  }

  // The failure of this rank and the index of its action (-1: before the
  // first).
  const std::optional<std::pair<Failure, int64_t>>& failure() const {
    return failure_;
  }
  bool failed() const {
    return failure_ || poison_;
  }
  const RankProgram& program() const {
    return *program_;
  }

 private:
  enum class Progress { kNext, kAgain, kAsk, kWait, kLost };
  // Channel, producing stage, consuming stage, microbatch.
  using Key = Ledger::Message;
  // Stage and microbatch.
  using Cell = Ledger::Cell;
  struct Incoming {
    Packed value;
    std::vector<bool> requires_grad;
  };

  // What a forward leaves for its backward.
  struct Graph {
    StageBackward backward;
    std::vector<size_t> inputs_of_way;  // tensors that each way in brought
    std::vector<size_t> outputs_of_way; // tensors that each way out takes
    std::vector<at::Tensor> outputs;    // until they have left
    size_t unsent = 0;                  // ways out that wait for their turn
    at::Tensor seed; // of the last stage: where its backward starts
  };

  // The backward beside the forward at hand.
  struct Beside {
    std::vector<Incoming> incoming;
    bool begun = false;
    bool done = false;
  };

  static Key key(const Way& way, uint32_t microbatch) {
    return {way.channel, way.source, way.target, microbatch};
  }
  // The action at hand.
  size_t current() const {
    return at_ + aside_;
  }
  Action action() const {
    return program_->row()[current()];
  }
  static std::vector<at::Tensor>
  tensors_of(const std::vector<Incoming>& incoming);
  Header header(const Way& way, uint32_t microbatch) const;
  void announce();
  void forget();
  Cell cell() const {
    return {action().stage, action().microbatch};
  }
  bool is_pair() const;
  void finish();

  // What traces and profilers see; nothing is done without one.
  void watch_begin();
  void watch_ready(const std::vector<Incoming>& incoming);
  void watch_beside(const std::vector<Incoming>& incoming);
  void watch_kept();
  void watch_end();
  void watch_stop();
  void watch_aside();
  void watch_again();
  void watch_asked(const Way& way);
  void watch_arrived(const Way& way, const std::vector<at::Tensor>& tensors);
  void watch_made(const Way& way, const std::vector<at::Tensor>& tensors);
  void watch_loss(const std::vector<Packed>& answer);
  void watch_used(const Way& way);
  void watch_sent(const Way& way);
  void watch_gradients();
  void forget_watched();

  Progress run(double seconds);
  Progress pass(double seconds);
  void take_answer(std::vector<Packed> answer);
  Progress forward(double seconds);
  Progress pair(double seconds);
  Progress backward(double seconds);
  void run_backward(const std::vector<Incoming>& incoming);
  Progress send(double seconds);
  Progress send_poison(double seconds);
  void receive();
  Progress drain(const std::vector<Way>& ways, double seconds);
  Progress collect(
      const std::vector<Way>& ways,
      double seconds,
      std::vector<Incoming>* values);
  void take(const std::vector<Way>& ways, std::vector<Incoming>* values);
  Progress await(const std::vector<Way>& ways, double seconds);
  Incoming take_local(const Way& way);
  std::optional<Message> take_message(const Way& way);
  void enter(std::vector<Incoming> incoming);
  void leave(const std::vector<Packed>& answer);
  void left(const Way& way);
  std::vector<at::Tensor> output_gradients(
      const std::vector<Incoming>& incoming,
      const Graph& graph) const;
  void
  keep_gradients(const std::vector<at::Tensor>& gradients, const Graph& graph);

  const std::shared_ptr<const RankProgram> program_;
  Transport* const transport_;
  const uint32_t user_ops_;

  bool training_ = false;
  std::unique_ptr<Ledger> ledger_; // of a traced run
  std::vector<Stamp> stamps_;
  // Of the messages that were asked for, the index of their RECV.
  std::map<Key, size_t> asked_at_;
  std::map<uint16_t, std::vector<at::Tensor>> watched_weights_;
  std::optional<at::RecordFunction> span_; // of the action at hand
  std::vector<double> weights_;
  size_t at_ = 0;
  size_t aside_ = 0; // 1 while the backward beside a forward is at hand
  bool asked_ = false;
  std::vector<Packed> request_;
  std::optional<std::pair<Failure, int64_t>> failure_;
  std::optional<Failure> poison_;
  std::map<Key, int64_t> tickets_;
  // What stages made, until it is sent or, on this rank, used.
  std::map<Key, Packed> results_;
  // What backwards need.
  std::map<Cell, Graph> graphs_;
  std::map<uint16_t, Split> splits_;
  std::set<uint16_t> fused_;
  std::optional<Beside> beside_;
};

} // namespace torch_sm3::pipeline
