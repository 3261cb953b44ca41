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
  kDeadlock,     ///< nobody waits for ever because of the links
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
  /// Most memory in use on each rank, in bytes; exact. Empty if a rule before
  /// kMemory is broken.
  std::vector<double> peak_bytes;
  /// Index, in each rank's (lowered) row, of the action at which it is in use.
  std::vector<size_t> peak_at;
  /// Texts of these actions; empty for an empty row.
  std::vector<std::string> peak_actions;

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

/// Checks a schedule in time linear in the number of actions: first what can be
/// seen in the rows (counts, messages, collectives), then whether the rows run
/// to their end (dependencies, deadlock), then memory. A schedule that lacks
/// its messages or its collectives is lowered first.
///
/// \param schedule the schedule
/// \param options  links, costs and limits
/// \throws std::invalid_argument naming the option that is wrong
TORCH_SM3_API Report
verify(const Schedule& schedule, const VerifyOptions& options = {});

/// Returns the bytes in use on a rank after each action of its (lowered) row:
/// what a runtime counts, action by action.
///
/// \param schedule the schedule
/// \param rank     the rank
/// \param costs    bytes of everything
/// \param links    when what was sent is given back
/// \throws ScheduleError if the schedule is not valid
/// \throws std::invalid_argument naming the argument that is wrong
TORCH_SM3_API std::vector<double> live_bytes(
    const Schedule& schedule,
    uint32_t rank,
    const Costs& costs,
    LinkModel links = {});

} // namespace torch_sm3::pipeline
