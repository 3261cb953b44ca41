// SPDX-License-Identifier: Apache-2.0
// The planner's front door: the kinds, what they accept, and who plans them.
#include <planner/planning.h>

#include <simulator/check_costs.h>
#include <torch_sm3/pipeline/search.h>

#include <algorithm>
#include <array>

namespace torch_sm3::pipeline {
namespace {

// Whose plan is the best of those of the others.
constexpr const char* kAuto = "auto";

enum class Placement : uint8_t { kLoop, kV };

struct Kind {
  const char* name;
  ChunkRule chunks;
  Placement placement;
  Rows (*rows)(const PlanOptions&, const Sizes&, RankRange);
};

Rows plan_none(const PlanOptions&, const Sizes& sizes, RankRange range) {
  return alternating_rows(sizes, range, {0});
}

Rows plan_gpipe(const PlanOptions&, const Sizes& sizes, RankRange range) {
  const size_t ranks = range.last - range.first;
  return alternating_rows(
      sizes, range, std::vector<uint32_t>(ranks, sizes.microbatches));
}

Rows plan_forward(const PlanOptions&, const Sizes& sizes, RankRange range) {
  return looped_rows(sizes, range, false);
}

Rows plan_1f1b(
    const PlanOptions& options,
    const Sizes& sizes,
    RankRange range) {
  return alternating_rows(sizes, range, warmups_1f1b(options, range));
}

Rows plan_interleaved(
    const PlanOptions& options,
    const Sizes& sizes,
    RankRange range) {
  const uint32_t group = options.group_size > 0
                             ? static_cast<uint32_t>(std::min(
                                   options.group_size, options.microbatches))
                             : automatic_group(sizes.ranks, sizes.microbatches);
  return interleaved_rows(sizes, range, group);
}

Rows plan_looped_bfs(const PlanOptions&, const Sizes& sizes, RankRange range) {
  return looped_rows(sizes, range, true);
}

Rows plan_zb_h1(const PlanOptions&, const Sizes& sizes, RankRange range) {
  return zero_bubble_rows(sizes, range, false);
}

Rows plan_zb_h2(const PlanOptions&, const Sizes& sizes, RankRange range) {
  return zero_bubble_rows(sizes, range, true);
}

template <VKind kind>
Rows plan_v(const PlanOptions&, const Sizes& sizes, RankRange range) {
  return v_rows(sizes, range, kind);
}

Rows plan_dualpipe_v(const PlanOptions&, const Sizes& sizes, RankRange range) {
  return dualpipe_rows(sizes, range);
}

constexpr std::array<Kind, 12> kKinds{{
    {"none", {1, false}, Placement::kLoop, plan_none},
    {"gpipe", {1, false}, Placement::kLoop, plan_gpipe},
    {"forward", {1, true}, Placement::kLoop, plan_forward},
    {"1f1b", {1, false}, Placement::kLoop, plan_1f1b},
    {"interleaved", {2, true}, Placement::kLoop, plan_interleaved},
    {"looped_bfs", {2, true}, Placement::kLoop, plan_looped_bfs},
    {"zb_h1", {1, false}, Placement::kLoop, plan_zb_h1},
    {"zb_h2", {1, false}, Placement::kLoop, plan_zb_h2},
    {"zbv", {2, false}, Placement::kV, plan_v<VKind::kZeroBubble>},
    {"v_half", {2, false}, Placement::kV, plan_v<VKind::kHalf>},
    {"v_min", {2, false}, Placement::kV, plan_v<VKind::kMin>},
    {"dualpipe_v", {2, false}, Placement::kV, plan_dualpipe_v},
}};

const Kind& find_kind(const std::string& name) {
  for (const Kind& kind : kKinds) {
    if (kind.name == name) {
      return kind;
    }
  }
  refuse_kind(name);
}

// The encoder's output reaches the decoder's first stage as its neighbour and
// is handed on from there, or reaches each later one by a route of its own.
std::vector<Route> routes_of(const PlanOptions& options, uint32_t stages) {
  std::vector<Route> routes;
  if (options.split > 0 && options.via == "direct") {
    const auto source = static_cast<uint16_t>(options.split - 1);
    for (uint32_t s = source + 2u; s < stages; ++s) {
      routes.push_back({source, static_cast<uint16_t>(s)});
    }
  }
  return routes;
}

// All of a schedule but its rows.
Schedule
shape_of(const PlanOptions& options, const Kind& kind, const Sizes& sizes) {
  Schedule shape;
  shape.kind = options.kind;
  shape.ranks = sizes.ranks;
  shape.stages = sizes.ranks * sizes.chunks;
  shape.microbatches = sizes.microbatches;
  shape.placement = kind.placement == Placement::kV
                        ? v_placement(sizes.ranks, shape.stages)
                        : loop_placement(sizes.ranks, shape.stages);
  check_options(options, shape.stages);
  shape.routes = routes_of(options, shape.stages);
  if (options.costs) {
    check_costs("plan", shape, *options.costs);
  }
  return shape;
}

} // namespace

const std::vector<std::string>& kinds() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Kind& kind : kKinds) {
      all.emplace_back(kind.name);
    }
    all.emplace_back(kAuto);
    return all;
  }();
  return names;
}

Schedule plan(const PlanOptions& options) {
  if (options.kind == kAuto) {
    return search(options).schedule;
  }
  const Kind& kind = find_kind(options.kind);
  const Sizes sizes = check_sizes(options, kind.chunks);
  Schedule schedule = shape_of(options, kind, sizes);
  schedule.rows = kind.rows(options, sizes, {0, sizes.ranks});
  return settle(options, std::move(schedule));
}

Schedule outline(const PlanOptions& options) {
  Schedule schedule;
  if (options.kind == kAuto) {
    schedule = plan(options);
    schedule.rows.clear();
  } else {
    const Kind& kind = find_kind(options.kind);
    schedule = shape_of(options, kind, check_sizes(options, kind.chunks));
  }
  schedule.rows.resize(schedule.ranks);
  return schedule;
}

std::vector<Action> plan_rank(const PlanOptions& options, int64_t rank) {
  check_rank(options, rank);
  if (options.kind == kAuto || needs_whole(options)) {
    return std::move(plan(options).rows[static_cast<size_t>(rank)]);
  }
  const Kind& kind = find_kind(options.kind);
  const Sizes sizes = check_sizes(options, kind.chunks);
  shape_of(options, kind, sizes);
  const auto own = static_cast<uint32_t>(rank);
  return std::move(kind.rows(options, sizes, {own, own + 1}).front());
}

} // namespace torch_sm3::pipeline
