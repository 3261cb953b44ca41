// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <classes/costs_dict.h>
#include <torch_sm3/pipeline/schedule.h>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace torch_sm3::pipeline {

/// Runs a function; its wrong arguments are ValueErrors in Python, and so are
/// schedule errors, whose text begins with `ScheduleError: `.
///
/// \param function what may throw them
template <class Function>
auto as_value_error(const Function& function) {
  try {
    return function();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  } catch (const ScheduleError& error) {
    TORCH_CHECK_VALUE(false, "ScheduleError: ", error.what());
  }
}

/// torch.classes.torch_sm3.PipelineSchedule: a schedule that does not change.
class PipelineSchedule : public torch::CustomClassHolder {
 public:
  /// Plans one.
  PipelineSchedule(
      std::string kind,
      int64_t ranks,
      int64_t chunks,
      int64_t microbatches);

  explicit PipelineSchedule(Schedule schedule)
      : schedule_(std::move(schedule)) {}

  /// What a search looked at: plan, makespan, peak bytes, why it was refused,
  /// and whether it was taken.
  using Alternative =
      std::tuple<std::string, double, double, std::string, bool>;

  /// Plans one with all options, whose names are those of PlanOptions; with a
  /// `rank` of 0 or more its row alone. Returns the schedule, its costs and
  /// the alternatives of a search, and advice on a forced group size.
  static std::tuple<
      c10::intrusive_ptr<PipelineSchedule>,
      CostsDict,
      std::vector<Alternative>,
      std::string>
  plan_with(
      std::string kind,
      int64_t ranks,
      int64_t microbatches,
      int64_t chunks,
      int64_t group_size,
      const CostsDict& costs,
      double link_cost,
      std::vector<double> memory_limit,
      int64_t max_pending,
      int64_t split,
      std::string via,
      int64_t warmup,
      int64_t rank);

  /// See pipeline::kinds.
  static std::vector<std::string> kinds();

  /// See pipeline::partition.
  static std::vector<int64_t> partition(
      const std::vector<double>& costs,
      int64_t stages,
      const std::vector<double>& memory,
      double limit);

  static c10::intrusive_ptr<PipelineSchedule> parse(const std::string& text);
  static c10::intrusive_ptr<PipelineSchedule>
  from_csv(const std::string& text, const std::string& kind);

  const Schedule& schedule() const {
    return schedule_;
  }

  /// See Schedule::complete.
  bool complete() const {
    return schedule_.complete();
  }
  c10::intrusive_ptr<PipelineSchedule> lower() const;
  /// The schedule with other routes and ties.
  ///
  /// \param routes source and target of each
  /// \param ties   members of each
  c10::intrusive_ptr<PipelineSchedule> with_routes(
      const std::vector<std::tuple<int64_t, int64_t>>& routes,
      const std::vector<std::vector<int64_t>>& ties) const;
  std::string text() const;
  std::string to_csv(const std::string& dialect) const;
  std::string kind() const;
  int64_t ranks() const;
  int64_t stages() const;
  int64_t microbatches() const;
  std::vector<int64_t> placement() const;
  std::vector<std::tuple<int64_t, int64_t>> routes() const;
  std::vector<std::vector<int64_t>> ties() const;

  /// Operation, stage, microbatch, number of the route or -1, and whether it is
  /// one cell with the next, of each action of one rank.
  std::vector<std::tuple<std::string, int64_t, int64_t, int64_t, bool>>
  actions(int64_t rank) const;

  /// Rule, message, grid, full grid, peak bytes and the actions at which they
  /// are reached.
  std::tuple<
      std::string,
      std::string,
      std::string,
      std::string,
      std::vector<double>,
      std::vector<std::string>>
  verify(
      const std::string& links,
      int64_t max_pending,
      const CostsDict& memory,
      std::vector<double> memory_limit,
      bool full) const;

  /// See pipeline::live_bytes.
  std::vector<double> live_bytes(
      int64_t rank,
      const CostsDict& memory,
      const std::string& links,
      int64_t max_pending) const;

  /// Makespan, busy, idle, own idle and peak bytes of each rank, lower bound,
  /// and start and end of each action of each rank in turn, if asked for.
  std::tuple<
      double,
      std::vector<double>,
      std::vector<double>,
      std::vector<double>,
      std::vector<double>,
      double,
      std::vector<std::vector<double>>>
  simulate(
      const CostsDict& costs,
      const std::string& links,
      int64_t max_pending,
      bool with_timeline) const;

 private:
  Schedule schedule_;
};

} // namespace torch_sm3::pipeline
