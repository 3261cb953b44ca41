// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>
#include <torch_sm3/pipeline/costs.h>
#include <torch_sm3/pipeline/schedule.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

/// What a schedule breaks.
enum class Rule : uint8_t {
  kNone,         ///< nothing
  kCounts,       ///< each (stage, microbatch) has one F, one B or one I and W
  kDependencies, ///< no cycle among actions, collectives and rows
  kMessages,     ///< one SEND and one RECV per edge, in one order per link
  kDeadlock,     ///< nobody waits for ever
  kCollectives,  ///< reductions once, late enough, in one order
  kMemory,       ///< within the limit
};

/// Names a rule, for example `deadlock`.
///
/// \param rule the rule
TORCH_SM3_API const char* name(Rule rule);

/// What `verify` found.
struct Report {
  Rule rule = Rule::kNone;
  /// What is wrong, in words; the waiting chain of a deadlock.
  std::string message;
  /// Counter-example: columns are ranks, rows steps, stuck cells marked;
  /// three steps around each stuck rank.
  std::string grid;
  /// The same with all steps; empty unless asked for.
  std::string full_grid;
  /// Most memory in use on each rank, in bytes; exact.
  std::vector<double> peak_bytes;
  /// Action of each rank's row at which it is in use.
  std::vector<size_t> peak_at;

  bool valid() const {
    return rule == Rule::kNone;
  }
  /// Throws ScheduleError with message and grid unless valid.
  TORCH_SM3_API void raise_if_invalid() const;
};

/// What to check besides the order.
struct VerifyOptions {
  LinkModel links;
  /// For the memory check; all bytes are zero by default.
  Costs costs;
  /// Bytes of each rank; one entry stands for all, none for no limit.
  std::vector<double> memory_limit;
  bool full_grid = false;
};

/// Checks a schedule: counts, dependencies, messages, deadlock, collectives and
/// memory, in this order, in time linear in the number of actions. A
/// compute-only schedule is lowered first.
///
/// \param schedule the schedule
/// \param options  links, costs and limits
TORCH_SM3_API Report
verify(const Schedule& schedule, const VerifyOptions& options = {});

} // namespace torch_sm3::pipeline
