// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/schedule.h>

#include <cstddef>
#include <cstdint>
#include <vector>

/// \file
/// Where the ranks of a schedule stop, and for what they wait.

namespace torch_sm3::pipeline {

/// What a rank waits for.
enum class Wait : uint8_t {
  kNothing,
  kMessage, ///< that a message is sent
  kSlot,    ///< that a receiver posts a RECV, which frees a place on a channel
  kMembers, ///< that the other ranks come to a collective
};

/// Where a rank stopped.
struct Stop {
  size_t at = 0; ///< index of the action at which it waits
  Wait wait = Wait::kNothing;
  /// Message: its slot. Slot: edge of the SEND that waits. Members: the
  /// collective, a tie or after all ties OPTIM.
  size_t what = 0;
  /// It has sent at this SEND, or come to this collective, already.
  bool begun = false;
};

/// Ranks of each tie, then the ranks that have an OPTIM; ascending.
///
/// \param schedule the schedule
std::vector<std::vector<uint32_t>> members_of(const Schedule& schedule);

} // namespace torch_sm3::pipeline
