// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <runtime/rank_program.h>
#include <transport/values.h>

#include <torch_sm3/pipeline/backward.h>
#include <torch_sm3/pipeline/transport.h>

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
    // As kUser, of the forward of a pair that is one call: `overlap` runs the
    // backward beside it.
    kPair = 4,
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

  // When an action began, had all it needed and ended, in nanoseconds of the
  // steady clock; and after it the bytes of values that wait to be sent or
  // used, and the messages that may be under way.
  struct Stamp {
    int64_t begin = 0;
    int64_t ready = 0;
    int64_t end = 0;
    int64_t kept = 0;
    int64_t pending = 0;
  };
  // Whether later runs are stamped.
  void trace(bool on) {
    tracing_ = on;
  }
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
  using Key = std::tuple<Channel, uint16_t, uint16_t, uint32_t>;
  // Stage and microbatch.
  using Cell = std::pair<uint16_t, uint32_t>;
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
    bool running = false; // or it threw
    bool done = false;
  };

  static Key key(const Way& way, uint32_t microbatch) {
    return {way.channel, way.source, way.target, microbatch};
  }
  Action action() const {
    return program_->row()[at_];
  }
  Header header(const Way& way, uint32_t microbatch) const;
  void forget();
  bool is_pair() const;
  void stamp_begin();
  void stamp_ready();
  void finish();

  Progress run(double seconds);
  Progress pass(double seconds);
  void take_answer(std::vector<Packed> answer);
  Progress forward(double seconds);
  Progress pair(double seconds);
  Progress backward(double seconds);
  void run_backward(Action which, const std::vector<Incoming>& incoming);
  Progress send(double seconds);
  Progress send_poison(double seconds);
  void receive();
  Progress drain(const std::vector<Way>& ways, double seconds);
  Progress collect(
      const std::vector<Way>& ways,
      double seconds,
      std::vector<Incoming>* values);
  Progress
  await(const std::vector<Way>& ways, uint32_t microbatch, double seconds);
  void take(
      const std::vector<Way>& ways,
      uint32_t microbatch,
      std::vector<Incoming>* values);
  Incoming take_local(const Way& way, uint32_t microbatch);
  std::optional<Message> take_message(const Way& way, uint32_t microbatch);
  void enter(std::vector<Incoming> incoming);
  void leave(const std::vector<Packed>& answer);
  void left(const Way& way, uint32_t microbatch);
  std::vector<at::Tensor> output_gradients(
      Action which,
      const std::vector<Incoming>& incoming,
      const Graph& graph) const;
  void keep_gradients(
      Action which,
      const std::vector<at::Tensor>& gradients,
      const Graph& graph);

  const std::shared_ptr<const RankProgram> program_;
  Transport* const transport_;
  const uint32_t user_ops_;

  bool training_ = false;
  bool tracing_ = false;
  std::vector<Stamp> stamps_;
  std::vector<double> weights_;
  size_t at_ = 0;
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
