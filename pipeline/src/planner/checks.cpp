// SPDX-License-Identifier: Apache-2.0
// What the planner refuses, in words.
#include <planner/planning.h>

#include <simulator/check_costs.h>

#include <algorithm>
#include <limits>
#include <numeric>

namespace torch_sm3::pipeline {
namespace {

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

constexpr int64_t kMostStages = std::numeric_limits<uint16_t>::max();

void check_size(int64_t value, int64_t most, const char* what) {
  if (value < 1 || value > most) {
    refuse_plan(
        std::string(what) + " from 1 to " + std::to_string(most),
        std::to_string(value),
        what);
  }
}

// What the kind makes no use of must not look as if it did.
void check_unused(const PlanOptions& options) {
  const auto is = [&](const char* kind) {
    return options.kind == kind || options.kind == "auto";
  };
  if (options.group_size > 0 && !is("interleaved")) {
    refuse_plan(
        "no group_size for kind " + options.kind,
        std::to_string(options.group_size),
        "group_size");
  }
  if (options.warmup >= 0 && !is("1f1b")) {
    refuse_plan(
        "no warmup for kind " + options.kind,
        std::to_string(options.warmup),
        "warmup");
  }
  if (options.via != "chain" && options.split == 0) {
    refuse_plan("a split beside via " + options.via, "none", "split");
  }
}

void check_split(const PlanOptions& options, int64_t stages) {
  if (options.split != 0 && stages < 2) {
    refuse_plan(
        "two or more stages beside a split", std::to_string(stages), "split");
  }
  if (options.split < 0 || options.split >= stages) {
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

} // namespace

void refuse_plan(
    const std::string& expected,
    const std::string& got,
    const char* argument) {
  throw std::invalid_argument(
      "plan: expected " + expected + ", but got " + got + " (argument '" +
      argument + "')");
}

void refuse_kind(const std::string& name) {
  const std::vector<std::string>& known = kinds();
  std::string all;
  for (const std::string& candidate : known) {
    all += (all.empty() ? "" : ", ") + candidate;
  }
  const std::string& nearest = *std::min_element(
      known.begin(), known.end(), [&](const auto& a, const auto& b) {
        return distance(name, a) < distance(name, b);
      });
  throw std::invalid_argument(
      "plan: expected kind in {" + all + "}, but got '" + name +
      "' (argument 'kind'), perhaps for '" + nearest + "'");
}

void check_rank(const PlanOptions& options, int64_t rank) {
  check_size(options.ranks, kMostStages, "ranks");
  if (rank < 0 || rank >= options.ranks) {
    refuse_plan(
        "a rank from 0 to " + std::to_string(options.ranks - 1),
        std::to_string(rank),
        "rank");
  }
}

Sizes check_sizes(const PlanOptions& options, ChunkRule rule) {
  const int64_t chunks = options.chunks == 0 ? rule.usual : options.chunks;
  check_size(options.ranks, kMostStages, "ranks");
  check_size(chunks, kMostStages / options.ranks, "chunks");
  check_size(
      options.microbatches,
      std::numeric_limits<uint32_t>::max(),
      "microbatches");
  if (options.kind == "none" && options.ranks != 1) {
    refuse_plan("1 rank for kind none", std::to_string(options.ranks), "ranks");
  }
  if (!rule.any && chunks != rule.usual) {
    refuse_plan(
        (rule.usual == 1 ? "1 chunk" : "2 chunks") +
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
  return {
      static_cast<uint32_t>(options.ranks),
      static_cast<uint32_t>(chunks),
      static_cast<uint32_t>(options.microbatches)};
}

void check_options(const PlanOptions& options, int64_t stages) {
  if (!(options.link_cost >= 0 && options.link_cost <= kMostCost)) {
    refuse_plan(
        "a link cost from 0 to " + short_number(kMostCost),
        short_number(options.link_cost),
        "link_cost");
  }
  if (options.group_size < 0) {
    refuse_plan(
        "a group size of 1 or more, or 0 to choose",
        std::to_string(options.group_size),
        "group_size");
  }
  if (options.max_pending < 1) {
    refuse_plan(
        "max_pending of at least 1",
        std::to_string(options.max_pending),
        "max_pending");
  }
  check_split(options, stages);
  check_limits(
      "plan", options.memory_limit, static_cast<size_t>(options.ranks));
  if (!options.memory_limit.empty() &&
      !(options.costs && has_bytes(*options.costs))) {
    refuse_plan("costs in bytes beside a memory limit", "none", "costs");
  }
  check_unused(options);
}

} // namespace torch_sm3::pipeline
