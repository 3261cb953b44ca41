// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>
#include <torch_sm3/pipeline/action.h>

#include <compare>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace torch_sm3::pipeline {

/// A schedule that cannot be read or cannot run.
class TORCH_SM3_API ScheduleError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A value that a stage sends to one that is not its successor.
struct Route {
  uint16_t source = 0;
  uint16_t target = 0;

  friend auto operator<=>(const Route&, const Route&) = default;
};

/// How a schedule is written as CSV.
enum class Dialect : uint8_t {
  kOwn,   ///< everything, under a first line `# schedule 1 ...`
  kTorch, ///< what torch.distributed.pipelining reads
};

/// What every rank does, in order: the program of one training step.
///
/// The text form is a line
/// `schedule 1 kind=1f1b ranks=2 stages=2 microbatches=3 placement=loop`
/// followed by one line `rank 0: 0F0 0F1 ...` for each rank; `.` is an idle
/// slot and `#` starts a comment.
struct Schedule {
  std::string kind;
  uint32_t ranks = 0;
  uint32_t stages = 0;
  uint32_t microbatches = 0;
  /// Rank of each stage.
  std::vector<uint32_t> placement;
  /// Values that skip stages, in ascending order of (source, target); at most
  /// 254.
  std::vector<Route> routes;
  /// Stages that hold each tied weight, in ascending order.
  std::vector<std::vector<uint16_t>> ties;
  /// Actions of each rank.
  std::vector<std::vector<Action>> rows;

  friend bool operator==(const Schedule&, const Schedule&) = default;

  /// Writes the text form; `parse` reads it back without loss.
  TORCH_SM3_API std::string text() const;

  /// Writes one action, with the other end of its route if it has one.
  ///
  /// \param action an action of this schedule
  TORCH_SM3_API std::string text(Action action) const;

  /// Reads the text form.
  ///
  /// \param text a schedule
  /// \throws ScheduleError naming row, column and cell of what it cannot read
  TORCH_SM3_API static Schedule parse(std::string_view text);

  /// Writes CSV: one row per rank, one cell per slot, an idle slot is empty.
  ///
  /// \param dialect whose words to use
  /// \throws ScheduleError if the dialect lacks a word, naming the first action
  ///     that needs it
  TORCH_SM3_API std::string to_csv(Dialect dialect = Dialect::kOwn) const;

  /// Reads CSV of either dialect, compute-only or with messages. Without the
  /// first line `# schedule 1 ...` ranks, stages, microbatches, placement and
  /// routes are inferred from the cells.
  ///
  /// \param text what was in the file
  /// \param kind name for a schedule without that line
  /// \throws ScheduleError naming row, column and cell of what it cannot read,
  ///     or with the verifier's counter-example if the order cannot run
  TORCH_SM3_API static Schedule
  from_csv(std::string_view text, const std::string& kind = "csv");

  /// Returns the schedule with other routes and ties.
  ///
  /// \param routes values that skip stages, each once, to a later stage
  /// \param ties   two or more stages for each tied weight
  /// \throws ScheduleError naming what is wrong, or if the schedule holds
  ///     messages or collectives, which belong to the routes and ties it has
  TORCH_SM3_API Schedule with_routes(
      std::vector<Route> routes,
      std::vector<std::vector<uint16_t>> ties) const;

  /// Tells whether any action is a message, REDUCE_GRAD, TIE_REDUCE or OPTIM.
  TORCH_SM3_API bool lowered() const;

  /// Tells whether the schedule has all that `lower` would add.
  TORCH_SM3_API bool complete() const;

  /// Adds the messages and collectives that a compute-only schedule lacks, in
  /// time linear in the number of actions.
  ///
  /// A SEND stands right after its producer. A RECV stands before the first
  /// action of its rank that starts, if B took three units of time and all else
  /// one, when or after the message is sent; its consumer never starts earlier.
  /// In one gap RECVs stand before SENDs. Stages on one rank exchange no
  /// message, and a result that no action makes or uses is not sent.
  ///
  /// REDUCE_GRAD follows the last weight gradient of its stage and what it
  /// sends. TIE_REDUCE stands once on each rank that holds a member, for the
  /// lowest of them: where a message sent by the last member's last weight
  /// gradient would be received, after any SEND in that gap; the members'
  /// REDUCE_GRAD follow it. OPTIM is last on all ranks. Neither is added
  /// without weight gradients.
  ///
  /// What is there already stays as it is, so lowering twice changes nothing.
  ///
  /// \throws ScheduleError if the order cannot run, with the actions at which
  ///     the ranks wait for each other
  TORCH_SM3_API Schedule lower() const;
};

/// Stage s on rank s mod p.
///
/// \param ranks  number of ranks
/// \param stages number of stages
TORCH_SM3_API std::vector<uint32_t>
loop_placement(uint32_t ranks, uint32_t stages);

/// Stages 0, 1, ..., p-1 down the ranks, then up again, as often as needed.
///
/// \param ranks  number of ranks
/// \param stages number of stages
TORCH_SM3_API std::vector<uint32_t>
v_placement(uint32_t ranks, uint32_t stages);

} // namespace torch_sm3::pipeline
