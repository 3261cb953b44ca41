// SPDX-License-Identifier: Apache-2.0
// What the search tries: kinds, chunks, group sizes, warm-ups and lists.
#include <search/trials.h>

#include <search/costs.h>

#include <algorithm>
#include <limits>
#include <tuple>

namespace torch_sm3::pipeline {
namespace {

constexpr uint32_t kMostChunks = 4;
constexpr int64_t kMostRounds = 3;
constexpr size_t kMostGroups = 4;
constexpr uint32_t kMostWidths = 6;

class Search {
 public:
  explicit Search(const PlanOptions& options)
      : options_(options),
        sizes_(check_sizes(options, {1, true})),
        given_(options.costs.value_or(Costs{})),
        trials_(options_) {
    const size_t stages = given_.stages.size();
    const size_t least =
        size_t{sizes_.ranks} * (options.chunks == 0 ? 1u : sizes_.chunks);
    const bool whole = options.chunks == 0 ? stages % least == 0 && stages > 0
                                           : stages == least;
    if (stages != 1 && !whole) {
      refuse_plan(
          "costs of 1 stage or of " +
              std::string(options.chunks == 0 ? "a multiple of " : "") +
              std::to_string(least),
          std::to_string(stages),
          "costs");
    }
    check_options(options, units());
    for (double& latency : given_.latency) {
      latency = std::max(latency, options.link_cost);
    }
  }

  Choice run() {
    if (options_.chunks > 0) {
      with_chunks(sizes_.chunks, given_);
      reorder_best(&trials_);
      return trials_.take();
    }
    for (const uint32_t v : chunk_counts()) {
      const std::string name = "chunks=" + std::to_string(v);
      const std::optional<Costs> costs = regroup(given_, sizes_.ranks, v);
      if (!costs) {
        trials_.refuse(
            name,
            "the costs of " + std::to_string(given_.stages.size()) +
                " stages cannot be put together into " +
                std::to_string(sizes_.ranks * v));
      } else if (options_.split * sizes_.ranks * v % units() != 0) {
        trials_.refuse(name, "the decoder would begin within a stage");
      } else {
        with_chunks(v, *costs);
        reorder_best(&trials_);
      }
    }
    return trials_.take();
  }

 private:
  // A few, and as many as the costs are given for.
  std::vector<uint32_t> chunk_counts() const {
    std::vector<uint32_t> counts;
    for (uint32_t v = 1; v <= kMostChunks; ++v) {
      if (uint64_t{v} * sizes_.ranks <= std::numeric_limits<uint16_t>::max()) {
        counts.push_back(v);
      }
    }
    const auto given =
        static_cast<uint32_t>(given_.stages.size() / sizes_.ranks);
    if (given > kMostChunks) {
      counts.push_back(given);
    }
    return counts;
  }

  PlanOptions of_kind(const char* kind, uint32_t chunks, const Costs& costs) {
    PlanOptions options = options_;
    options.kind = kind;
    options.chunks = chunks;
    options.costs = costs;
    options.memory_limit.clear();
    options.group_size = 0;
    options.warmup = -1;
    options.split = split_of(chunks);
    return options;
  }

  // Stages that the caller counts in: those of the costs, or one per rank.
  int64_t units() const {
    if (options_.chunks > 0) {
      return int64_t{sizes_.ranks} * sizes_.chunks;
    }
    return std::max<int64_t>(
        sizes_.ranks, static_cast<int64_t>(given_.stages.size()));
  }
  int64_t split_of(uint32_t chunks) const {
    return options_.split * sizes_.ranks * chunks / units();
  }

  void named(const std::string& name, const PlanOptions& options) {
    try {
      trials_.measure(name, plan(options), *options.costs);
    } catch (const ScheduleError& error) {
      const std::string why = error.what();
      trials_.refuse(name, why.substr(0, why.find('\n')));
    }
  }

  void with_chunks(uint32_t v, const Costs& costs) {
    if (v == 1) {
      one_chunk(costs);
    } else {
      loops(v, costs);
      if (v == 2) {
        valleys(costs);
      }
    }
  }

  void one_chunk(const Costs& costs) {
    if (sizes_.ranks == 1) {
      named("none", of_kind("none", 1, costs));
    }
    named("gpipe", of_kind("gpipe", 1, costs));
    warm_ups(costs);
    named("zb_h1", of_kind("zb_h1", 1, costs));
    named("zb_h2", of_kind("zb_h2", 1, costs));
    lists("gpipe", 1, costs, "list");
  }

  void warm_ups(const Costs& costs) {
    PlanOptions options = of_kind("1f1b", 1, costs);
    options.warmup = options_.warmup;
    std::vector<int64_t> rounds{static_cast<int64_t>(warmup_rounds(options))};
    for (int64_t k = 0; k <= kMostRounds && options_.warmup < 0; ++k) {
      if (k != rounds[0]) {
        rounds.push_back(k);
      }
    }
    for (const int64_t k : rounds) {
      options.warmup = k;
      options.memory_limit.clear();
      const std::string name = "1f1b warmup=" + std::to_string(k);
      named(name, options);
      if (!trials_.last_fits() && k > 0) {
        options.memory_limit = options_.memory_limit;
        named(name + " lowered", options);
      }
    }
  }

  void loops(uint32_t v, const Costs& costs) {
    const std::string chunks = " chunks=" + std::to_string(v);
    PlanOptions options = of_kind("interleaved", v, costs);
    for (const int64_t group : groups()) {
      options.group_size = group;
      named(
          "interleaved" + chunks + " group_size=" + std::to_string(group),
          options);
    }
    named("looped_bfs" + chunks, of_kind("looped_bfs", v, costs));
    lists("looped_bfs", v, costs, "list" + chunks);
  }

  // The automatic one, then longer ones whose last group is as long as p.
  std::vector<int64_t> groups() const {
    if (options_.group_size > 0) {
      return {options_.group_size};
    }
    const uint32_t p = sizes_.ranks;
    const uint32_t m = sizes_.microbatches;
    std::vector<int64_t> groups{automatic_group(p, m)};
    for (uint32_t n = static_cast<uint32_t>(groups[0]) + 1;
         n < m && groups.size() < kMostGroups;
         ++n) {
      if (m % n == 0 || m % n >= p) {
        groups.push_back(n);
      }
    }
    return groups;
  }

  void valleys(const Costs& costs) {
    for (const char* kind : {"zbv", "v_half", "v_min"}) {
      named(kind, of_kind(kind, 2, costs));
    }
    if (sizes_.microbatches < 2 * uint64_t{sizes_.ranks}) {
      trials_.refuse(
          "dualpipe_v",
          "needs " + std::to_string(2 * sizes_.ranks) + " microbatches");
    } else {
      named("dualpipe_v", of_kind("dualpipe_v", 2, costs));
    }
    wider_valleys(costs);
    lists("zbv", 2, costs, "list chunks=2 placement=v");
  }

  // Between the memory of v_half or v_min and that of zbv.
  void wider_valleys(const Costs& costs) {
    const uint32_t p = sizes_.ranks;
    const uint32_t widths =
        trials_within(2 * p, sizes_.microbatches, 1, kMostWidths);
    Schedule schedule = plan(of_kind("zbv", 2, costs));
    schedule.kind = options_.kind;
    for (const auto& [name, kind, least] :
         {std::tuple("v_half", VKind::kHalf, (p + 2) / 2),
          std::tuple("v_min", VKind::kMin, (p + 4) / 3)}) {
      const uint32_t step = std::max(1u, (p - least) / widths);
      for (uint32_t more = step; least + more <= p; more += step) {
        for (const uint32_t first : {more, more + 1}) {
          schedule.rows = v_rows(sizes_of(2), {0, p}, kind, {2 * more, first});
          trials_.measure(
              std::string(name) + " more=" + std::to_string(more) +
                  " first=" + std::to_string(first),
              schedule,
              costs);
        }
      }
    }
  }

  Sizes sizes_of(uint32_t chunks) const {
    return {sizes_.ranks, chunks, sizes_.microbatches};
  }

  void lists(
      const char* like,
      uint32_t chunks,
      const Costs& costs,
      const std::string& name) {
    try_lists(
        options_, plan(of_kind(like, chunks, costs)), costs, name, &trials_);
  }

  const PlanOptions& options_;
  Sizes sizes_;
  Costs given_;
  Trials trials_;
};

} // namespace

Choice search(const PlanOptions& options) {
  if (options.kind != "auto") {
    refuse_plan("kind auto", "'" + options.kind + "'", "kind");
  }
  return Search(options).run();
}

} // namespace torch_sm3::pipeline
