// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>

#include <cstdint>
#include <string>

namespace torch_sm3::pipeline {

/// What a rank does in one slot of a schedule.
enum class Op : uint8_t {
  kIdle,           ///< nothing: `.`
  kForward,        ///< `F`: forward of one stage and microbatch
  kBackward,       ///< `B`: full backward, input and weight gradients
  kBackwardInput,  ///< `I`: gradients of a stage's inputs
  kBackwardWeight, ///< `W`: gradients of a stage's weights
  kSendForward,    ///< `SEND_F`: the stage's output leaves
  kRecvForward,    ///< `RECV_F`: an input of the stage arrives
  kSendBackward,   ///< `SEND_B`: the gradient of an input leaves
  kRecvBackward,   ///< `RECV_B`: the gradient of the stage's output arrives
  kReduceGrad,     ///< `REDUCE_GRAD`: data-parallel reduction of one stage
  kTieReduce,      ///< `TIE_REDUCE`: sum of a tied weight's gradients
  kOptimizer,      ///< `OPTIM`: optimizer step of the rank
  kValidate,       ///< `VALIDATE`: end of the optimizer step before this one
  kUnshard,        ///< `UNSHARD`: callback before a stage is used
  kReshard,        ///< `RESHARD`: callback after a stage was used
};
inline constexpr int kOps = 15;

/// Flag of a compute action: it and the next one of its row are one cell,
/// `(0F3;5B1)OVERLAP_F_B`.
inline constexpr uint8_t kPaired = 1;

/// One action of a schedule, in eight bytes: lists of tens of millions are
/// planned at p = 1024.
struct Action {
  Op op = Op::kIdle;
  /// Of a compute action: kPaired or 0. Of a message: 0 if it travels between
  /// neighbouring stages, else 1 + the number of its route in
  /// `Schedule::routes`.
  uint8_t flags = 0;
  uint16_t stage = 0;
  /// Number of the microbatch; of TIE_REDUCE the number of the tie in
  /// `Schedule::ties`; otherwise 0.
  uint32_t microbatch = 0;

  friend bool operator==(const Action&, const Action&) = default;
};
static_assert(sizeof(Action) == 8);

/// Tells whether an operation moves a message instead of computing.
///
/// \param op the operation
constexpr bool is_message(Op op) {
  return op >= Op::kSendForward && op <= Op::kRecvBackward;
}

/// Tells whether an operation is a forward or a (part of a) backward.
///
/// \param op the operation
constexpr bool is_compute(Op op) {
  return op >= Op::kForward && op <= Op::kBackwardWeight;
}

/// Tells whether an operation makes the gradients of a stage's inputs.
///
/// \param op the operation
constexpr bool gives_input_gradient(Op op) {
  return op == Op::kBackward || op == Op::kBackwardInput;
}

/// Tells whether an operation makes the gradients of a stage's weights.
///
/// \param op the operation
constexpr bool gives_weight_gradient(Op op) {
  return op == Op::kBackward || op == Op::kBackwardWeight;
}

/// Returns the name of an operation as it stands in a schedule's text.
///
/// \param op the operation
TORCH_SM3_API const char* name(Op op);

/// Writes an action between neighbouring stages as `<stage><op><microbatch>`,
/// for example `2F0`; see `Schedule::text` for those with a route.
///
/// \param action the action
TORCH_SM3_API std::string text(Action action);

} // namespace torch_sm3::pipeline
