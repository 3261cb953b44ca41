// SPDX-License-Identifier: Apache-2.0
// Which lists of the greedy scheduler the search tries.
#include <search/trials.h>

#include <search/list_scheduler.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace torch_sm3::pipeline {
namespace {

constexpr const char* kReordered = " reordered";

std::string rounded(double value) {
  std::array<char, 32> buffer{};
  std::snprintf(buffer.data(), buffer.size(), "%.4g", value);
  return buffer.data();
}

// Places of the actions of a plan, for ListPolicy::order; B is I and W.
std::vector<uint32_t> order_of(const Schedule& schedule) {
  const size_t part = size_t{schedule.stages} * schedule.microbatches;
  std::vector<uint32_t> order(3 * part);
  for (const auto& row : schedule.rows) {
    for (uint32_t at = 0; at < row.size(); ++at) {
      const Action action = row[at];
      const size_t piece =
          size_t{action.stage} * schedule.microbatches + action.microbatch;
      if (action.op == Op::kForward) {
        order[piece] = at;
      }
      if (gives_input_gradient(action.op)) {
        order[part + piece] = at;
      }
      if (gives_weight_gradient(action.op)) {
        order[2 * part + piece] = at;
      }
    }
  }
  return order;
}

// Lists of one placement under many budgets.
class Lists {
 public:
  Lists(Schedule shape, const Costs& costs, std::string name, Trials* trials)
      : shape_(std::move(shape)),
        costs_(costs),
        name_(std::move(name)),
        trials_(trials),
        units_(shape_.ranks),
        stages_(shape_.ranks),
        fixed_(shape_.ranks) {
    shape_.kind = "auto";
    shape_.rows.clear();
    bool known = false;
    for (uint32_t s = 0; s < shape_.stages; ++s) {
      policy_.weights.push_back(costs_.of(s).activation_bytes);
      known = known || policy_.weights.back() > 0;
    }
    if (!known) {
      policy_.weights.assign(shape_.stages, 1);
    }
    for (uint32_t s = 0; s < shape_.stages; ++s) {
      const uint32_t rank = shape_.placement[s];
      policy_.released.push_back(known ? costs_.of(s).released_at_input : 0);
      stages_[rank].push_back(s);
      units_[rank] += policy_.weights[s];
      fixed_[rank] += costs_.of(s).static_bytes;
    }
    bytes_ = known;
  }

  // Budgets that no limit asks for: from one microbatch per rank up to twice
  // the number of ranks, where no rank of equal stages waits any more.
  void even(bool forwards_first, bool shares) {
    policy_.forwards_first = forwards_first;
    policy_.shares = shares;
    const double chunks = static_cast<double>(shape_.stages) / shape_.ranks;
    const double most = std::min<double>(
        2.0 * shape_.ranks, static_cast<double>(shape_.microbatches));
    const uint32_t count = budgets();
    double before = 0;
    for (uint32_t k = 0; k < count; ++k) {
      const double wanted = count > 1 ? 1 + (most - 1) * k / (count - 1) : most;
      const double factor = std::round(wanted * chunks) / chunks;
      if (factor > before) {
        before = factor;
        for_factor(factor);
      }
    }
  }

  // All that the limits leave.
  void up_to_limits(bool forwards_first, bool shares) {
    if (!bytes_) {
      return;
    }
    policy_.forwards_first = forwards_first;
    policy_.shares = shares;
    policy_.budgets.resize(shape_.ranks);
    std::vector<double> messages(shape_.ranks);
    // Messages take room too; how much, only the plan tells.
    constexpr int kTries = 4;
    for (int i = 0; i < kTries; ++i) {
      for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
        policy_.budgets[rank] = std::max(
            units_[rank] + more(rank),
            trials_->limit(rank) - fixed_[rank] - messages[rank]);
      }
      const std::vector<double> over =
          trials_->over(measure(" budget=limit try=" + std::to_string(i + 1)));
      bool fits = true;
      for (uint32_t rank = 0; rank < over.size(); ++rank) {
        messages[rank] += over[rank];
        fits = fits && over[rank] == 0;
      }
      if (fits) {
        return;
      }
    }
  }

  // What a plan does, within what it holds itself.
  void follow(const Schedule& plan) {
    policy_.order = order_of(plan);
    policy_.budgets.assign(shape_.ranks, 0);
    for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
      double held = 0;
      for (const Action action : plan.rows[rank]) {
        const double weight = policy_.weights[action.stage];
        const double released = policy_.released[action.stage];
        held += action.op == Op::kForward         ? weight
                : action.op == Op::kBackward      ? -weight
                : action.op == Op::kBackwardInput ? -released
                                                  : released - weight;
        policy_.budgets[rank] = std::max(policy_.budgets[rank], held);
      }
    }
    measure(kReordered);
  }

 private:
  double more(uint32_t rank) const {
    return more_of_one_input(policy_, stages_[rank]);
  }

  uint32_t budgets() const {
    return trials_within(shape_.stages, shape_.microbatches, 2, 12);
  }

  void for_factor(double factor) {
    policy_.budgets.clear();
    for (uint32_t rank = 0; rank < shape_.ranks; ++rank) {
      policy_.budgets.push_back(factor * units_[rank] + more(rank));
    }
    measure(" budget=" + rounded(factor));
  }

  std::vector<double> measure(const std::string& budget) {
    Schedule schedule = shape_;
    schedule.rows = schedule_list(shape_, costs_, policy_);
    return trials_->measure(
        name_ + budget + (policy_.forwards_first ? " forwards_first" : "") +
            (policy_.shares ? " shares" : ""),
        std::move(schedule),
        costs_);
  }

  Schedule shape_;
  const Costs& costs_;
  std::string name_;
  Trials* trials_;
  ListPolicy policy_;
  std::vector<double> units_; // of each rank: one activation of each chunk
  std::vector<std::vector<uint32_t>> stages_; // of each rank
  std::vector<double> fixed_; // of each rank: bytes that are always there
  bool bytes_ = false;        // whether activations have a size
};

} // namespace

void try_lists(
    const PlanOptions& options,
    Schedule shape,
    const Costs& costs,
    const std::string& name,
    Trials* trials) {
  const bool many = shape.stages > shape.ranks;
  Lists lists(std::move(shape), costs, name, trials);
  for (const bool forwards_first : {false, true}) {
    for (const bool shares : {false, true}) {
      // With one chunk there is no later one to prefer or to share with.
      if (many || (!forwards_first && !shares)) {
        lists.even(forwards_first, shares);
        if (!options.memory_limit.empty()) {
          lists.up_to_limits(forwards_first, shares);
        }
      }
    }
  }
}

void reorder_best(Trials* trials) {
  constexpr int kRounds = 3;
  for (int round = 0; round < kRounds && trials->best() != nullptr; ++round) {
    const Choice best = *trials->best();
    const std::string name = trials->best_plan();
    if (trials->tried(name + kReordered)) {
      return;
    }
    Lists lists(best.schedule, best.costs, name, trials);
    lists.follow(best.schedule);
    if (trials->best_plan() == name) {
      return;
    }
  }
}

} // namespace torch_sm3::pipeline
