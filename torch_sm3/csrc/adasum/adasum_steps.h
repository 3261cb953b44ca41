// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Steps of one run of an algorithm: named, timed messages.

#include "adasum_algorithms.h"
#include "adasum_grid.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace torch_sm3::distributed {

/// Adds the time until its end to a phase.
class PhaseTimer {
 public:
  PhaseTimer(Outcome* outcome, Phase phase)
      : outcome_(outcome),
        phase_(phase),
        begin_(std::chrono::steady_clock::now()) {}
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;
  ~PhaseTimer() {
    if (outcome_ != nullptr) {
      outcome_->seconds[static_cast<size_t>(phase_)] +=
          std::chrono::duration<double>(
              std::chrono::steady_clock::now() - begin_)
              .count();
    }
  }

 private:
  Outcome* const outcome_;
  const Phase phase_;
  const std::chrono::steady_clock::time_point begin_;
};

/// What a step is for; with level, piece and turn it makes the step's tag.
enum class Step : int8_t {
  leaves,
  dots,
  exponents,
  carried,
  return_,
  sums,    ///< of dots over shards or over a block of ranks
  largest, ///< of exponents, likewise
};

/// A step's name: equal on the ranks that take part, used once per job.
struct StepName {
  Step step;
  int64_t level;
  int64_t index = 0; ///< of the piece or layer
  int64_t turn = 0;  ///< tells repetitions apart
};

/// Tells the tag of a step from those of all others of a call.
int tag_of_step(uint64_t call, const StepName& name);

/// "operation, phase" for errors.
std::string describe_step(const std::string& what, Step step);

/// Posts a step of a job on its transport.
std::unique_ptr<Transport::Posted> post_step(
    const Job& job,
    const StepName& name,
    std::vector<Transport::Message> receives,
    std::vector<Transport::Message> sends);

/// A run of rows of a tensor, held by one rank.
struct Part {
  int rank;
  Range rows;
};

/// Posts the exchange of rows of a tensor, each held by one rank at first.
std::unique_ptr<Transport::Posted> post_parts(
    const Job& job,
    const StepName& name,
    const std::vector<Part>& parts,
    const at::Tensor& tensor);

} // namespace torch_sm3::distributed
