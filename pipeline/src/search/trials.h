// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <planner/planning.h>

#include <simulator/check_costs.h>
#include <torch_sm3/pipeline/search.h>

#include <optional>

namespace torch_sm3::pipeline {

// What was tried, and the best of it.
class Trials {
 public:
  // `options` must outlive this.
  explicit Trials(const PlanOptions& options);

  // Notes a plan that cannot be tried.
  void refuse(std::string plan, std::string why);

  // Tries a plan; returns the peak of each rank, nothing if it cannot run.
  std::vector<double>
  measure(std::string plan, Schedule schedule, const Costs& costs);

  // Of each rank: bytes above its limit.
  std::vector<double> over(const std::vector<double>& peaks) const;
  double limit(size_t rank) const {
    return limit_of(options_.memory_limit, rank);
  }

  // The best so far, and its name; nothing if none fitted.
  const Choice* best() const {
    return best_ ? &choice_ : nullptr;
  }
  std::string best_plan() const {
    return candidates_[*best_].plan;
  }

  // Whether the last plan that was tried is within its limits.
  bool last_fits() const {
    return candidates_.back().refused.empty();
  }

  bool tried(const std::string& plan) const;

  // The best; throws ScheduleError if nothing fitted.
  Choice take();

 private:
  bool better(const Candidate& candidate) const;

  const PlanOptions& options_;
  std::vector<Candidate> candidates_;
  std::optional<size_t> best_;
  Choice choice_;
  // Peaks of the plan that is least above the limits.
  std::vector<double> least_;
  double least_excess_ = 0;
  std::string least_plan_;
};

// How many plans of one kind to try: fewer where they are long, so that the
// search stays within seconds.
uint32_t trials_within(
    uint32_t stages,
    uint32_t microbatches,
    uint32_t least,
    uint32_t most);

// lists.cpp: tries lists of the greedy scheduler on a placement.
void try_lists(
    const PlanOptions& options,
    Schedule shape,
    const Costs& costs,
    const std::string& name,
    Trials* trials);

// lists.cpp: tries the best plan so far with its actions in the order in which
// they become ready at these costs, as long as that makes it better.
void reorder_best(Trials* trials);

} // namespace torch_sm3::pipeline
