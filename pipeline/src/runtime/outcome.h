// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <runtime/replicas.h>

#include <torch_sm3/pipeline/runtime.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace torch_sm3::pipeline {

// In place of an action: the arguments of the step were wrong on that rank.
inline constexpr const char* kArguments = "arguments";

// Another member of a collective failed; its own failure is told in its stead.
class PeerFailedError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What the rank of the last stage knows of a step.
struct Verdict {
  at::Tensor loss;
  at::Tensor losses;
  std::vector<c10::IValue> metrics;
  // What gradients are to be divided by, if by anything.
  std::optional<double> total;
};

// What one rank tells the others at the end of a step.
struct RankReport {
  std::optional<std::pair<Failure, int64_t>> failure;
  bool had_gradients = false;
  Verdict verdict;
};

c10::IValue value_of(const RankReport& report);
RankReport read_report(const c10::IValue& value);

// Throws the error of the step if any rank of any replica reports a failure:
// that of the least stage, microbatch and action; the others are listed. Sums
// `total` over the replicas.
void raise_failures(
    const std::vector<RankReport>& reports,
    Replicas* replicas,
    std::optional<double>* total);

// The error of a failure that ended the links themselves.
[[noreturn]] void raise_lost(const Failure& failure);

// A loss whose backward says that the step has done it.
at::Tensor guarded(const at::Tensor& loss);

} // namespace torch_sm3::pipeline
