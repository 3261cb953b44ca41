// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/schedule.h>

#include <algorithm>
#include <random>
#include <set>
#include <tuple>
#include <vector>

/// \file
/// Random compute-only schedules that can run.

namespace torch_sm3::pipeline {

/// (F, B, I or W; stage; microbatch).
using Step = std::tuple<Op, uint32_t, uint32_t>;

/// What has to be done before a step, whoever does it.
///
/// \param schedule stages and routes
/// \param step     the step
/// \param split    whether the step's stage has I and W instead of B
inline std::vector<Step> needs_of(
    const Schedule& schedule,
    const Step& step,
    const std::vector<bool>& split) {
  const auto [op, stage, microbatch] = step;
  const auto gradient = [&, i = microbatch](uint32_t of) {
    return Step{split[of] ? Op::kBackwardInput : Op::kBackward, of, i};
  };
  std::vector<Step> needs;
  if (op == Op::kForward) {
    if (stage > 0) {
      needs.push_back({op, stage - 1, microbatch});
    }
    for (const Route route : schedule.routes) {
      if (route.target == stage) {
        needs.push_back({op, route.source, microbatch});
      }
    }
    return needs;
  }
  if (op == Op::kBackwardWeight) {
    return {{Op::kBackwardInput, stage, microbatch}};
  }
  needs.push_back({Op::kForward, stage, microbatch});
  if (stage + 1 < schedule.stages) {
    needs.push_back(gradient(stage + 1));
  }
  for (const Route route : schedule.routes) {
    if (route.source == stage) {
      needs.push_back(gradient(route.target));
    }
  }
  return needs;
}

/// A schedule with everything that the language has, and who splits.
struct RandomSchedule {
  Schedule schedule;
  std::vector<bool> split; ///< by stage: I and W instead of B
};

/// Draws stages, ranks, placement, routes, ties and an order that can run.
///
/// \param random where the numbers come from
inline RandomSchedule random_schedule(std::mt19937* random) {
  const auto below = [&](uint32_t n) {
    return static_cast<uint32_t>((*random)() % n);
  };
  Schedule s;
  s.kind = "random";
  s.ranks = 1 + below(4);
  s.stages = 1 + below(6);
  s.microbatches = 1 + below(4);
  std::vector<bool> split;
  for (uint32_t stage = 0; stage < s.stages; ++stage) {
    s.placement.push_back(below(s.ranks));
    split.push_back(below(2) == 0);
  }
  std::set<Route> routes;
  for (uint32_t n = below(4); n > 0 && s.stages > 1; --n) {
    const auto target = static_cast<uint16_t>(1 + below(s.stages - 1));
    routes.insert({static_cast<uint16_t>(below(target)), target});
  }
  s.routes.assign(routes.begin(), routes.end());
  for (uint32_t n = below(3); n > 0 && s.stages > 1; --n) {
    const auto last = static_cast<uint16_t>(1 + below(s.stages - 1));
    std::set<uint16_t> members{static_cast<uint16_t>(below(last)), last};
    members.insert(static_cast<uint16_t>(below(s.stages)));
    s.ties.emplace_back(members.begin(), members.end());
  }
  s.rows.resize(s.ranks);

  std::vector<Step> left;
  const bool training = below(5) > 0;
  for (uint32_t stage = 0; stage < s.stages; ++stage) {
    for (uint32_t i = 0; i < s.microbatches; ++i) {
      left.push_back({Op::kForward, stage, i});
      if (training && split[stage]) {
        left.push_back({Op::kBackwardInput, stage, i});
        left.push_back({Op::kBackwardWeight, stage, i});
      } else if (training) {
        left.push_back({Op::kBackward, stage, i});
      }
    }
  }
  std::set<Step> done;
  const auto ready = [&](const Step& step) {
    const std::vector<Step> needs = needs_of(s, step, split);
    return std::all_of(needs.begin(), needs.end(), [&](const Step& need) {
      return done.count(need) > 0;
    });
  };
  const auto take = [&](const Step& step, uint8_t flags) {
    const auto [op, stage, i] = step;
    s.rows[s.placement[stage]].push_back(
        {op, flags, static_cast<uint16_t>(stage), i});
    left.erase(std::find(left.begin(), left.end(), step));
  };
  while (!left.empty()) {
    std::vector<Step> now;
    std::copy_if(left.begin(), left.end(), std::back_inserter(now), ready);
    const Step first = now[below(static_cast<uint32_t>(now.size()))];
    const uint32_t rank = s.placement[std::get<1>(first)];
    const auto second =
        std::find_if(now.begin(), now.end(), [&](const Step& step) {
          return gives_input_gradient(std::get<0>(step)) &&
                 s.placement[std::get<1>(step)] == rank;
        });
    if (below(8) == 0) {
      s.rows[rank].push_back({});
    }
    if (std::get<0>(first) == Op::kForward && second != now.end() &&
        below(2) == 0) {
      take(first, kPaired);
      take(*second, 0);
      done.insert(*second);
    } else {
      take(first, 0);
    }
    done.insert(first);
  }
  return {s, split};
}

} // namespace torch_sm3::pipeline
