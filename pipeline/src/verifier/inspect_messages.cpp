// SPDX-License-Identifier: Apache-2.0
// Rule 3, and rule 2 as far as it concerns one rank.
#include <verifier/inspect.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

constexpr uint8_t kSent = 1;
constexpr uint8_t kReceived = 2;

std::string of_rank(uint32_t rank) {
  return " of rank " + std::to_string(rank);
}

class Messages {
 public:
  explicit Messages(const Program& program)
      : program_(program),
        schedule_(program.schedule()),
        made_(size_t{2} * schedule_.stages * schedule_.microbatches),
        met_(program.slots()),
        numbers_(program.slots()),
        sent_(program.links()),
        received_(program.links()) {}

  std::optional<Violation> run() {
    for (uint32_t rank = 0; rank < schedule_.ranks; ++rank) {
      early_.clear();
      const auto& row = schedule_.rows[rank];
      for (size_t at = 0; at < row.size(); ++at) {
        if (is_compute(row[at].op)) {
          compute(rank, at, row[at]);
        } else if (is_message(row[at].op)) {
          message(rank, at, row[at]);
        }
      }
      explain_early(rank);
    }
    if (surplus_ || dependency_) {
      return surplus_ ? surplus_ : dependency_;
    }
    find_missing();
    return missing_ ? missing_ : order_;
  }

 private:
  // A consumer before the RECV of its value, if there is one.
  struct Early {
    size_t at;
    size_t slot;
    uint32_t edge;
  };

  static void keep(std::optional<Violation>* first, Violation violation) {
    if (!*first) {
      *first = std::move(violation);
    }
  }

  size_t piece(bool backward, uint32_t stage, uint32_t microbatch) const {
    return ((backward ? schedule_.stages : 0) + size_t{stage}) *
               schedule_.microbatches +
           microbatch;
  }

  void compute(uint32_t rank, size_t at, Action action) {
    if (action.op == Op::kBackwardWeight) {
      return;
    }
    const bool backward = action.op != Op::kForward;
    made_[piece(backward, action.stage, action.microbatch)] = true;
    for (const uint32_t edge : program_.local_needs(backward, action.stage)) {
      const uint32_t source = program_.edges()[edge].source;
      if (!made_[piece(backward, source, action.microbatch)]) {
        keep(
            &dependency_,
            {Rule::kDependencies,
             "verify: expected " + schedule_.text(action) + of_rank(rank) +
                 " after " + (backward ? "the backward" : "F") + " of stage " +
                 std::to_string(source) + ", but got it before",
             rank,
             at});
      }
    }
    for (const uint32_t edge : program_.needs(backward, action.stage)) {
      const size_t slot = program_.slot(edge, action.microbatch);
      if ((met_[slot] & kReceived) == 0 && early_.size() < kMostEarly) {
        early_.push_back({at, slot, edge});
      }
    }
  }

  void message(uint32_t rank, size_t at, Action action) {
    const uint32_t index = program_.edge_of(action);
    const Edge& edge = program_.edges()[index];
    const bool sends =
        action.op == Op::kSendForward || action.op == Op::kSendBackward;
    if (!edge.crosses) {
      keep(
          &surplus_,
          {Rule::kMessages,
           "verify: expected messages between stages on different ranks, but "
           "got " +
               schedule_.text(action) + of_rank(rank),
           rank,
           at});
      return;
    }
    const size_t slot = program_.slot(index, action.microbatch);
    const uint8_t bit = sends ? kSent : kReceived;
    if ((met_[slot] & bit) != 0) {
      keep(
          &surplus_,
          {Rule::kMessages,
           "verify: expected each message once, but got " +
               schedule_.text(action) + " twice on rank " +
               std::to_string(rank),
           rank,
           at});
      return;
    }
    met_[slot] |= bit;
    if (sends && !made_[piece(edge.backward, edge.source, action.microbatch)]) {
      keep(
          &dependency_,
          {Rule::kDependencies,
           "verify: expected " + schedule_.text(action) + of_rank(rank) +
               " after what makes its message, but got it before",
           rank,
           at});
    }
    match(rank, at, action, slot, ++(sends ? sent_ : received_)[edge.link]);
  }

  // Each message has one number at both ends of its link.
  void
  match(uint32_t rank, size_t at, Action action, size_t slot, uint32_t number) {
    if (met_[slot] != (kSent | kReceived)) {
      numbers_[slot] = number;
      return;
    }
    if (numbers_[slot] != number) {
      const Edge& edge = program_.edges()[program_.edge_of(action)];
      const bool sends = rank == edge.from;
      keep(
          &order_,
          {Rule::kMessages,
           "verify: expected rank " + std::to_string(edge.to) +
               " to receive from rank " + std::to_string(edge.from) +
               " in the order of sending, but got " + schedule_.text(action) +
               " as number " + std::to_string(number) + " on rank " +
               std::to_string(rank) + ", and as number " +
               std::to_string(numbers_[slot]) + " on rank " +
               std::to_string(sends ? edge.to : edge.from),
           rank,
           at});
    }
  }

  // A RECV that comes too late breaks the order; one that never comes is
  // reported as missing.
  void explain_early(uint32_t rank) {
    for (const Early& early : early_) {
      if ((met_[early.slot] & kReceived) != 0) {
        const Action action = schedule_.rows[rank][early.at];
        keep(
            &dependency_,
            {Rule::kDependencies,
             "verify: expected " + schedule_.text(action) + of_rank(rank) +
                 " after " +
                 schedule_.text(
                     program_.message(early.edge, action.microbatch, false)) +
                 ", but got it before",
             rank,
             early.at});
        return;
      }
    }
  }

  void find_missing() {
    const uint32_t m = schedule_.microbatches;
    for (uint32_t index = 0; index < program_.edges().size(); ++index) {
      const Edge& edge = program_.edges()[index];
      for (uint32_t i = 0; edge.crosses && i < m; ++i) {
        const uint8_t met = met_[program_.slot(index, i)];
        // Without backwards no one makes gradients.
        if (met == (kSent | kReceived) ||
            (met == 0 && !made_[piece(edge.backward, edge.source, i)])) {
          continue;
        }
        const bool sends = (met & kSent) == 0;
        const uint32_t rank = sends ? edge.from : edge.to;
        missing_ = Violation{
            Rule::kMessages,
            "verify: expected " +
                schedule_.text(program_.message(index, i, sends)) +
                " on rank " + std::to_string(rank) + ", but got none",
            rank,
            std::nullopt};
        return;
      }
    }
  }

  // Enough to find the first that is not missing altogether in any row that
  // anyone would mend by hand.
  static constexpr size_t kMostEarly = 64;

  const Program& program_;
  const Schedule& schedule_;
  // Forwards, then input gradients, that were met.
  std::vector<uint8_t> made_;
  // By slot: which ends of a message were met, and its number at the first.
  std::vector<uint8_t> met_;
  std::vector<uint32_t> numbers_;
  // By link.
  std::vector<uint32_t> sent_;
  std::vector<uint32_t> received_;
  std::vector<Early> early_;
  // In the order in which they are reported.
  std::optional<Violation> surplus_;
  std::optional<Violation> dependency_;
  std::optional<Violation> missing_;
  std::optional<Violation> order_;
};

} // namespace

std::optional<Violation> inspect_messages(const Program& program) {
  return Messages(program).run();
}

} // namespace torch_sm3::pipeline
