// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/schedule.h>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace torch_sm3::pipeline {

/// Runs a function; Python knows its schedule errors and wrong arguments as
/// ValueError.
///
/// \param function what may throw them
template <class Function>
auto as_value_error(const Function& function) {
  try {
    return function();
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  } catch (const ScheduleError& error) {
    TORCH_CHECK_VALUE(false, error.what());
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

  static c10::intrusive_ptr<PipelineSchedule> parse(const std::string& text);

  const Schedule& schedule() const {
    return schedule_;
  }

  c10::intrusive_ptr<PipelineSchedule> lower() const;
  std::string text() const;
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

 private:
  Schedule schedule_;
};

} // namespace torch_sm3::pipeline
