// SPDX-License-Identifier: Apache-2.0
// Tries plans one after the other and keeps the best that fits.
#include <search/trials.h>

#include <simulator/run.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

// Makespans closer than this, relative, are equal: they are sums of many costs.
constexpr double kTie = 1e-9;

std::string join(const std::vector<double>& values) {
  std::string all;
  for (const double value : values) {
    all += (all.empty() ? "" : ", ") + short_number(value);
  }
  return values.size() == 1 ? all : "[" + all + "]";
}

double largest(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

} // namespace

uint32_t trials_within(
    uint32_t stages,
    uint32_t microbatches,
    uint32_t least,
    uint32_t most) {
  constexpr double kActions = 4e5;
  const double each = 3.0 * stages * microbatches;
  return static_cast<uint32_t>(
      std::clamp<double>(kActions / each, least, most));
}

Trials::Trials(const PlanOptions& options) : options_(options) {}

std::vector<double> Trials::over(const std::vector<double>& peaks) const {
  std::vector<double> over;
  for (size_t rank = 0; rank < peaks.size(); ++rank) {
    over.push_back(std::max(0.0, peaks[rank] - limit(rank)));
  }
  return over;
}

bool Trials::tried(const std::string& plan) const {
  return std::any_of(
      candidates_.begin(), candidates_.end(), [&](const Candidate& candidate) {
        return candidate.plan == plan;
      });
}

void Trials::refuse(std::string plan, std::string why) {
  Candidate& candidate = candidates_.emplace_back();
  candidate.plan = std::move(plan);
  candidate.refused = std::move(why);
}

std::vector<double>
Trials::measure(std::string plan, Schedule schedule, const Costs& costs) {
  Candidate& candidate = candidates_.emplace_back();
  candidate.plan = std::move(plan);
  std::vector<double> peaks;
  try {
    const Schedule lowered = schedule.lower();
    const Program program(lowered);
    candidate.makespan = run_program(program, costs, {}, false).makespan;
    peaks = peak_bytes_of(program, costs, held_links(options_));
  } catch (const ScheduleError& error) {
    const std::string why = error.what();
    candidate.refused = why.substr(0, why.find('\n'));
    return {};
  }
  candidate.peak_bytes = largest(peaks);
  const std::vector<double> excess = over(peaks);
  if (least_.empty() || largest(excess) < least_excess_) {
    least_excess_ = largest(excess);
    least_ = peaks;
    least_plan_ = candidate.plan;
  }
  const auto worst = static_cast<size_t>(
      std::max_element(excess.begin(), excess.end()) - excess.begin());
  if (excess[worst] > 0) {
    candidate.refused = "rank " + std::to_string(worst) + " needs " +
                        short_number(peaks[worst]) + " bytes, its limit is " +
                        short_number(limit(worst));
  } else if (better(candidate)) {
    best_ = candidates_.size() - 1;
    choice_.schedule = std::move(schedule);
    choice_.costs = costs;
  }
  return peaks;
}

bool Trials::better(const Candidate& candidate) const {
  if (!best_) {
    return true;
  }
  const Candidate& best = candidates_[*best_];
  const double tie = kTie * std::max(best.makespan, candidate.makespan);
  if (candidate.makespan < best.makespan - tie) {
    return true;
  }
  return candidate.makespan <= best.makespan + tie &&
         candidate.peak_bytes < best.peak_bytes;
}

Choice Trials::take() {
  if (!best_ && least_.empty()) {
    throw ScheduleError(
        "plan: expected options that some plan can keep to, but got none: " +
        candidates_.back().plan + ": " + candidates_.back().refused);
  }
  if (!best_) {
    // The limit that some plan keeps; with a limit per rank, the peaks of the
    // plan that lacks least.
    const bool one = options_.memory_limit.size() == 1;
    const std::vector<double> needed =
        one ? std::vector<double>{largest(least_)} : least_;
    throw ScheduleError(
        "plan: expected a memory limit of at least " + join(needed) +
        " bytes for kind auto (" + least_plan_ + "), but got " +
        join(options_.memory_limit) + " (argument 'memory_limit')");
  }
  candidates_[*best_].chosen = true;
  choice_.alternatives = std::move(candidates_);
  return std::move(choice_);
}

} // namespace torch_sm3::pipeline
