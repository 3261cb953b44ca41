// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>

#include <cstdint>
#include <string>

namespace torch_sm3::pipeline {

/// What a rank does in one slot of a schedule.
enum class Op : uint8_t {
  kIdle,         ///< nothing: `.`
  kForward,      ///< `F`: forward of one stage and microbatch
  kBackward,     ///< `B`: full backward, input and weight gradients
  kSendForward,  ///< `SEND_F`: the stage's output leaves for the next stage
  kRecvForward,  ///< `RECV_F`: the stage's input arrives
  kSendBackward, ///< `SEND_B`: the input's gradient leaves
  kRecvBackward, ///< `RECV_B`: the output's gradient arrives
};

/// One cell of a schedule, in eight bytes: lists of tens of millions are
/// planned at p = 1024.
struct Action {
  Op op = Op::kIdle;
  uint8_t flags = 0;
  uint16_t stage = 0;
  uint32_t microbatch = 0;

  friend bool operator==(const Action&, const Action&) = default;
};
static_assert(sizeof(Action) == 8);

/// Tells whether an operation moves a message instead of computing.
///
/// \param op the operation
constexpr bool is_message(Op op) {
  return op >= Op::kSendForward;
}

/// Returns the name of an operation as it stands in a schedule's text.
///
/// \param op the operation
TORCH_SM3_API const char* name(Op op);

/// Writes an action as `<stage><op><microbatch>`, for example `2F0`.
///
/// \param action the action
TORCH_SM3_API std::string text(Action action);

} // namespace torch_sm3::pipeline
