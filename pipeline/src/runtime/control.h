// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/runtime.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

// The rank that hears all others and tells them what was heard.
inline constexpr int64_t kHub = 0;
// Waits are cut into slices of this length, in seconds.
inline constexpr double kSlice = 0.2;
// In place of an action: the arguments of the step were wrong on that rank.
inline constexpr const char* kArguments = "arguments";

// Ends everything after the links were lost.
class LinksLost : public std::exception {};

// Gives every rank the values of all of them, in rank order; for one rank
// `transport` is null.
std::vector<c10::IValue> exchange(
    Transport* transport,
    int64_t rank,
    int64_t ranks,
    const c10::IValue& own);

// Name of an exception's class, and its text without a trace.
std::string type_of(const std::exception& error);
std::string text_of(const std::exception& error);

// What one rank tells the others at the end of a step.
struct RankReport {
  std::optional<std::pair<Failure, int64_t>> failure;
  bool had_gradients = false;
  at::Tensor loss; // from the rank of the last stage
  at::Tensor losses;
};

c10::IValue value_of(const RankReport& report);
RankReport read_report(const c10::IValue& value);

// Throws the error of the step if any rank reports a failure: that of the least
// stage, microbatch and action; the others are listed.
void raise_failures(const std::vector<RankReport>& reports);

// The error of a failure that ended the links themselves.
[[noreturn]] void raise_lost(const Failure& failure);

} // namespace torch_sm3::pipeline
