// SPDX-License-Identifier: Apache-2.0
// The schedule that all ranks run, with what their stages add to it.
#include <runtime/agree.h>

#include <torch_sm3/check.h>

#include <algorithm>

namespace torch_sm3::pipeline {

Schedule completed(
    const Schedule& schedule,
    std::vector<Route> routes,
    const Members& members) {
  std::vector<std::vector<uint16_t>> ties;
  for (const auto& [name, all] : members) {
    if (stages_of(all).size() > 1) {
      ties.push_back(stages_of(all));
    }
  }
  std::sort(ties.begin(), ties.end());
  auto known = schedule.ties;
  std::sort(known.begin(), known.end());
  // Without messages a schedule may leave some out, but not know others.
  const bool complete = schedule.lowered();
  const auto fits = [&](const auto& declared, const auto& given) {
    return complete ? declared == given
                    : std::includes(
                          given.begin(),
                          given.end(),
                          declared.begin(),
                          declared.end());
  };
  TORCH_SM3_CHECK_VALUE(
      fits(schedule.routes, routes),
      "PipelineRunner",
      "schedule",
      c10::str("the ", routes.size(), " routes of the stages"),
      c10::str(schedule.routes.size(), " others"));
  TORCH_SM3_CHECK_VALUE(
      fits(known, ties),
      "PipelineRunner",
      "schedule",
      c10::str("the ", ties.size(), " tied weights of the stages"),
      c10::str(known.size(), " others"));
  return complete ? schedule
                  : schedule.with_routes(std::move(routes), std::move(ties));
}

std::vector<std::vector<Member>>
numbered(Members members, const std::vector<std::vector<uint16_t>>& known) {
  std::vector<std::vector<Member>> ties;
  for (const auto& stages : known) {
    const auto found =
        std::find_if(members.begin(), members.end(), [&](const auto& entry) {
          return stages_of(entry.second) == stages;
        });
    ties.push_back(std::move(found->second));
    members.erase(found);
  }
  for (auto& entry : members) {
    ties.push_back(std::move(entry.second));
  }
  return ties;
}

void add_collectives(Agreement* known, int64_t rank) {
  std::vector<Action>& row = known->schedule.rows.at(static_cast<size_t>(rank));
  const auto has = [&](Op op, int64_t stage, uint32_t number) {
    return std::any_of(row.begin(), row.end(), [&](Action action) {
      return action.op == op &&
             (op == Op::kTieReduce ? action.microbatch == number
                                   : action.stage == stage);
    });
  };
  for (uint32_t number = 0; number < known->ties.size(); ++number) {
    for (const Member& member : known->ties[number]) {
      if (member.rank == rank && !has(Op::kTieReduce, 0, number)) {
        row.push_back(
            {Op::kTieReduce, 0, static_cast<uint16_t>(member.stage), number});
      }
    }
  }
  // In the order of their last weight gradients.
  std::vector<uint16_t> late;
  for (auto action = row.rbegin(); action != row.rend(); ++action) {
    if (gives_weight_gradient(action->op) &&
        std::find(late.begin(), late.end(), action->stage) == late.end()) {
      late.push_back(action->stage);
    }
  }
  for (auto stage = late.rbegin(); stage != late.rend(); ++stage) {
    if (!has(Op::kReduceGrad, *stage, 0)) {
      row.push_back({Op::kReduceGrad, 0, *stage, 0});
    }
  }
}

} // namespace torch_sm3::pipeline
