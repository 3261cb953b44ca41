// SPDX-License-Identifier: Apache-2.0
// Rule 5.
#include <verifier/inspect.h>
#include <verifier/stops.h>

#include <map>

namespace torch_sm3::pipeline {
namespace {

class Collectives {
 public:
  explicit Collectives(const Schedule& schedule)
      : schedule_(schedule),
        members_(members_of(schedule)),
        weights_left_(schedule.stages),
        ties_left_(schedule.stages),
        reduced_(schedule.stages),
        numbers_(schedule.ties.size()),
        group_of_(schedule.ties.size()) {
    for (const auto& row : schedule.rows) {
      for (const Action action : row) {
        weights_left_[action.stage] += gives_weight_gradient(action.op) ? 1 : 0;
        training_ |= gives_weight_gradient(action.op);
      }
    }
    std::map<std::vector<uint32_t>, size_t> groups;
    for (size_t tie = 0; tie < schedule.ties.size(); ++tie) {
      group_of_[tie] =
          groups.emplace(members_[tie], groups.size()).first->second;
      for (const uint16_t stage : schedule.ties[tie]) {
        ++ties_left_[stage];
      }
    }
    counts_.resize(groups.size());
  }

  std::optional<Violation> run() {
    for (uint32_t rank = 0; rank < schedule_.ranks && !violation_; ++rank) {
      begin_row();
      const auto& row = schedule_.rows[rank];
      for (size_t at = 0; at < row.size() && !violation_; ++at) {
        act(rank, at, row[at]);
      }
      lacks(training_ && !optimized_, rank, "OPTIM");
    }
    for (uint32_t stage = 0; training_ && stage < schedule_.stages; ++stage) {
      const uint32_t rank = schedule_.placement[stage];
      const std::string number = std::to_string(stage);
      lacks(ties_left_[stage] > 0, rank, "TIE_REDUCE for stage " + number);
      lacks(reduced_[stage] == 0, rank, number + "REDUCE_GRAD");
    }
    return violation_;
  }

 private:
  void begin_row() {
    std::fill(counts_.begin(), counts_.end(), 0);
    tied_.assign(schedule_.ties.size(), false);
    optimized_ = validated_ = backward_ = false;
  }

  void act(uint32_t rank, size_t at, Action action) {
    const auto expect = [&](bool good, const std::string& what) {
      if (!good && !violation_) {
        violation_ = Violation{
            Rule::kCollectives,
            "verify: expected " + what + ", but got " + schedule_.text(action) +
                " at index " + std::to_string(at) + " of rank " +
                std::to_string(rank),
            rank,
            at};
      }
    };
    switch (action.op) {
      case Op::kReduceGrad:
        expect(reduced_[action.stage]++ == 0, "one REDUCE_GRAD of each stage");
        expect(
            weights_left_[action.stage] == 0,
            "REDUCE_GRAD after the stage's last weight gradient");
        expect(
            ties_left_[action.stage] == 0,
            "REDUCE_GRAD after the TIE_REDUCE of the stage");
        expect(!optimized_, "OPTIM after REDUCE_GRAD");
        break;
      case Op::kTieReduce:
        tie(rank, action, expect);
        break;
      case Op::kOptimizer:
        expect(!optimized_, "one OPTIM of each rank");
        optimized_ = true;
        break;
      case Op::kValidate:
        expect(!validated_, "one VALIDATE of each rank");
        expect(!backward_, "VALIDATE before the first backward");
        validated_ = true;
        break;
      default:
        if (gives_weight_gradient(action.op)) {
          --weights_left_[action.stage];
          expect(!optimized_, "OPTIM after the last weight gradient");
        }
        backward_ |= is_compute(action.op) && action.op != Op::kForward;
    }
  }

  template <class Expect>
  void tie(uint32_t rank, Action action, const Expect& expect) {
    const uint32_t tie = action.microbatch;
    expect(!tied_[tie], "each TIE_REDUCE once on a rank");
    expect(!optimized_, "OPTIM after TIE_REDUCE");
    tied_[tie] = true;
    for (const uint16_t stage : schedule_.ties[tie]) {
      if (schedule_.placement[stage] == rank) {
        expect(
            weights_left_[stage] == 0,
            "TIE_REDUCE after the last weight gradient of its members");
        --ties_left_[stage];
      }
    }
    // The first member of a group sets the order.
    const size_t number = ++counts_[group_of_[tie]];
    expect(
        numbers_[tie] == 0 || numbers_[tie] == number,
        "one order of TIE_REDUCE on all members of a group");
    numbers_[tie] = number;
  }

  void lacks(bool missing, uint32_t rank, const std::string& what) {
    if (missing && !violation_) {
      violation_ = Violation{
          Rule::kCollectives,
          "verify: expected " + what + " on rank " + std::to_string(rank) +
              ", but got none",
          rank,
          std::nullopt};
    }
  }

  const Schedule& schedule_;
  const std::vector<std::vector<uint32_t>> members_;
  bool training_ = false;
  // By stage: what has to come before its REDUCE_GRAD.
  std::vector<size_t> weights_left_;
  std::vector<size_t> ties_left_;
  std::vector<size_t> reduced_;
  // By tie: its number within its group, on all members.
  std::vector<size_t> numbers_;
  std::vector<size_t> group_of_;
  // Of the row: by group, by tie, and what was met.
  std::vector<size_t> counts_;
  std::vector<bool> tied_;
  bool optimized_ = false;
  bool validated_ = false;
  bool backward_ = false;
  std::optional<Violation> violation_;
};

} // namespace

std::optional<Violation> inspect_collectives(const Schedule& schedule) {
  return Collectives(schedule).run();
}

} // namespace torch_sm3::pipeline
