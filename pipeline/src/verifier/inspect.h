// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/verifier.h>
#include <verifier/program.h>

#include <optional>
#include <string>

/// \file
/// What can be told from a schedule without running it.

namespace torch_sm3::pipeline {

/// What a schedule breaks, and where.
struct Violation {
  Rule rule = Rule::kNone;
  std::string message;
  uint32_t rank = 0;
  /// Index of an action of the row; nothing if what is wrong is that it lacks.
  std::optional<size_t> at;
};

/// Checks that the parts of a schedule fit together, so that its actions can be
/// used as indices: sizes, and stages, microbatches, routes and ties of all
/// actions.
///
/// \param schedule the schedule
std::optional<Violation> inspect_shape(const Schedule& schedule);

/// Checks that each stage and microbatch has its forward and, unless no one has
/// a backward, B or I and W, in this order.
///
/// \param schedule of a shape that fits
std::optional<Violation> inspect_counts(const Schedule& schedule);

/// Checks that each value that goes to another rank has one SEND after its
/// producer and one RECV before its consumer, that values of one rank are made
/// before they are used, and that each link is read in the order in which it is
/// written.
///
/// \param program a schedule whose counts are right
std::optional<Violation> inspect_messages(const Program& program);

/// Checks that reductions, optimizer steps and validations stand once each,
/// after what they need, and in one order on all members of a group.
///
/// \param schedule a lowered schedule whose counts are right
std::optional<Violation> inspect_collectives(const Schedule& schedule);

} // namespace torch_sm3::pipeline
