// SPDX-License-Identifier: Apache-2.0
// The planner's front door: the kinds, what they accept, and who plans them.
#include "planning.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>

namespace torch_sm3::pipeline {
namespace {

enum class Placement : uint8_t { kLoop, kV };

struct Kind {
  const char* name;
  uint32_t usual_chunks;
  bool any_chunks; // otherwise only the usual number
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
    {"none", 1, false, Placement::kLoop, plan_none},
    {"gpipe", 1, false, Placement::kLoop, plan_gpipe},
    {"forward", 1, true, Placement::kLoop, plan_forward},
    {"1f1b", 1, false, Placement::kLoop, plan_1f1b},
    {"interleaved", 2, true, Placement::kLoop, plan_interleaved},
    {"looped_bfs", 2, true, Placement::kLoop, plan_looped_bfs},
    {"zb_h1", 1, false, Placement::kLoop, plan_zb_h1},
    {"zb_h2", 1, false, Placement::kLoop, plan_zb_h2},
    {"zbv", 2, false, Placement::kV, plan_v<VKind::kZeroBubble>},
    {"v_half", 2, false, Placement::kV, plan_v<VKind::kHalf>},
    {"v_min", 2, false, Placement::kV, plan_v<VKind::kMin>},
    {"dualpipe_v", 2, false, Placement::kV, plan_dualpipe_v},
}};

// Number of single-letter edits between two words.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, change});
    }
  }
  return row[b.size()];
}

const Kind& find_kind(const std::string& name) {
  for (const Kind& kind : kKinds) {
    if (kind.name == name) {
      return kind;
    }
  }
  const std::vector<std::string>& known = kinds();
  std::string all;
  for (const std::string& candidate : known) {
    all += (all.empty() ? "" : ", ") + candidate;
  }
  const std::string& nearest = *std::min_element(
      known.begin(), known.end(), [&](const auto& a, const auto& b) {
        return distance(name, a) < distance(name, b);
      });
  refuse_plan(
      "kind in {" + all + "}",
      "'" + name + "', perhaps for '" + nearest + "'",
      "kind");
}

int64_t chunks_of(const PlanOptions& options, const Kind& kind) {
  return options.chunks == 0 ? kind.usual_chunks : options.chunks;
}

void check_size(int64_t value, int64_t most, const char* what) {
  if (value < 1 || value > most) {
    refuse_plan(
        std::string(what) + " from 1 to " + std::to_string(most),
        std::to_string(value),
        what);
  }
}

void check_sizes(const PlanOptions& options, const Kind& kind) {
  constexpr int64_t kMostStages = std::numeric_limits<uint16_t>::max();
  check_size(options.ranks, kMostStages, "ranks");
  check_size(chunks_of(options, kind), kMostStages / options.ranks, "chunks");
  check_size(
      options.microbatches,
      std::numeric_limits<uint32_t>::max(),
      "microbatches");
  if (options.kind == "none" && options.ranks != 1) {
    refuse_plan("1 rank for kind none", std::to_string(options.ranks), "ranks");
  }
  if (!kind.any_chunks && chunks_of(options, kind) != kind.usual_chunks) {
    refuse_plan(
        (kind.usual_chunks == 1 ? "1 chunk" : "2 chunks") +
            (" for kind " + options.kind),
        std::to_string(options.chunks),
        "chunks");
  }
  const int64_t least = 2 * options.ranks;
  if (options.kind == "dualpipe_v" && options.microbatches < least) {
    throw std::invalid_argument(
        "plan: dualpipe_v expected microbatches >= " + std::to_string(least) +
        " (2 x ranks), but got " + std::to_string(options.microbatches) +
        " (argument 'microbatches')");
  }
}

void check_costs(const PlanOptions& options, int64_t stages) {
  if (!std::isfinite(options.link_cost) || options.link_cost < 0) {
    refuse_plan(
        "a link cost of 0 or more",
        short_number(options.link_cost),
        "link_cost");
  }
  if (!options.costs) {
    return;
  }
  const auto given = static_cast<int64_t>(options.costs->stages.size());
  if (given != 1 && given != stages) {
    refuse_plan(
        "costs of 1 or " + std::to_string(stages) + " stages",
        std::to_string(given),
        "costs");
  }
}

void check_split(const PlanOptions& options, int64_t stages) {
  if (options.split < 0 || options.split >= std::max<int64_t>(stages, 1)) {
    refuse_plan(
        "a first stage of the decoder from 1 to " + std::to_string(stages - 1) +
            ", or 0 for none",
        std::to_string(options.split),
        "split");
  }
  if (options.via != "chain" && options.via != "direct") {
    refuse_plan("via in {chain, direct}", "'" + options.via + "'", "via");
  }
  // An action has eight bits for the number of its route.
  constexpr int64_t kMostRoutes = 254;
  const int64_t routes = stages - 1 - options.split;
  if (options.split > 0 && options.via == "direct" && routes > kMostRoutes) {
    refuse_plan(
        "at most " + std::to_string(kMostRoutes) + " routes, or via chain",
        std::to_string(routes),
        "split");
  }
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

struct Request {
  const Kind* kind = nullptr;
  Sizes sizes;
};

Request check(const PlanOptions& options) {
  const Kind& kind = find_kind(options.kind);
  check_sizes(options, kind);
  const int64_t chunks = chunks_of(options, kind);
  check_costs(options, options.ranks * chunks);
  check_split(options, options.ranks * chunks);
  return {
      &kind,
      {static_cast<uint32_t>(options.ranks),
       static_cast<uint32_t>(chunks),
       static_cast<uint32_t>(options.microbatches)}};
}

} // namespace

void refuse_plan(
    const std::string& expected,
    const std::string& got,
    const char* argument) {
  throw std::invalid_argument(
      "plan: expected " + expected + ", but got " + got + " (argument '" +
      argument + "')");
}

std::string short_number(double value) {
  std::array<char, 32> buffer{};
  const bool whole = value == std::floor(value) && std::abs(value) < 1e15;
  std::snprintf(buffer.data(), buffer.size(), whole ? "%.0f" : "%.17g", value);
  return buffer.data();
}

const std::vector<std::string>& kinds() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const Kind& kind : kKinds) {
      all.emplace_back(kind.name);
    }
    return all;
  }();
  return names;
}

Schedule plan(const PlanOptions& options) {
  const auto [kind, sizes] = check(options);
  Schedule schedule;
  schedule.kind = options.kind;
  schedule.ranks = sizes.ranks;
  schedule.stages = sizes.ranks * sizes.chunks;
  schedule.microbatches = sizes.microbatches;
  schedule.placement = kind->placement == Placement::kV
                           ? v_placement(sizes.ranks, schedule.stages)
                           : loop_placement(sizes.ranks, schedule.stages);
  schedule.routes = routes_of(options, schedule.stages);
  schedule.rows = kind->rows(options, sizes, {0, sizes.ranks});
  return schedule;
}

std::vector<Action> plan_rank(const PlanOptions& options, int64_t rank) {
  const auto [kind, sizes] = check(options);
  if (rank < 0 || rank >= options.ranks) {
    refuse_plan(
        "a rank from 0 to " + std::to_string(options.ranks - 1),
        std::to_string(rank),
        "rank");
  }
  const auto own = static_cast<uint32_t>(rank);
  return std::move(kind->rows(options, sizes, {own, own + 1}).front());
}

} // namespace torch_sm3::pipeline
