// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/verifier.h>
#include <verifier/inspect.h>
#include <verifier/program.h>

#include <optional>

namespace torch_sm3::pipeline {

/// A schedule with all its messages and collectives, of which everything is
/// checked that needs no run: what verifier and simulator start from.
class Lowered {
 public:
  /// Lowers a schedule if it lacks messages or collectives, and checks it.
  ///
  /// \param schedule  the schedule; must outlive this
  /// \param full_grid whether the report shows all steps
  explicit Lowered(const Schedule& schedule, bool full_grid = false);

  Lowered(const Lowered&) = delete;
  Lowered& operator=(const Lowered&) = delete;

  /// What is wrong; nothing if all is right.
  const std::optional<Report>& report() const {
    return report_;
  }

  /// The schedule's edges, if nothing is wrong.
  const Program& program() const {
    return *program_;
  }

 private:
  const Schedule* schedule_;
  // The program refers to it, so this never moves.
  std::optional<Schedule> own_;
  std::optional<Program> program_;
  std::optional<Report> report_;
};

/// Reports a violation, with a counter-example.
///
/// \param schedule  what was checked
/// \param violation what is wrong
/// \param full      whether to show all steps
Report failed(const Schedule& schedule, const Violation& violation, bool full);

/// Runs a schedule and reports where its ranks stop, if they do.
///
/// \param program what to run
/// \param links   how messages are posted and matched
/// \param direct  run a schedule without messages
/// \param full    whether to show all steps
std::optional<Report>
find_stop(const Program& program, LinkModel links, bool direct, bool full);

} // namespace torch_sm3::pipeline
