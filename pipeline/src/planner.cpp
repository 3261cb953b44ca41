// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/pipeline/planner.h>

#include <algorithm>
#include <limits>
#include <numeric>

namespace torch_sm3::pipeline {
namespace {

[[noreturn]] void fail(
    const std::string& expected,
    const std::string& got,
    const char* argument) {
  throw std::invalid_argument(
      "plan: expected " + expected + ", but got " + got + " (argument '" +
      argument + "')");
}

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

void check_kind(const std::string& kind) {
  const std::vector<std::string>& known = kinds();
  if (std::find(known.begin(), known.end(), kind) != known.end()) {
    return;
  }
  std::string all;
  for (const std::string& candidate : known) {
    all += (all.empty() ? "" : ", ") + candidate;
  }
  const std::string& nearest = *std::min_element(
      known.begin(), known.end(), [&](const auto& a, const auto& b) {
        return distance(kind, a) < distance(kind, b);
      });
  fail(
      "kind in {" + all + "}",
      "'" + kind + "', perhaps for '" + nearest + "'",
      "kind");
}

int64_t chunks_of(const PlanOptions& options) {
  return options.chunks == 0 ? 1 : options.chunks;
}

void check(const PlanOptions& options) {
  check_kind(options.kind);
  const auto check_size = [](int64_t value, int64_t most, const char* what) {
    if (value < 1 || value > most) {
      fail(
          std::string(what) + " from 1 to " + std::to_string(most),
          std::to_string(value),
          what);
    }
  };
  constexpr int64_t kMostStages = std::numeric_limits<uint16_t>::max();
  check_size(options.ranks, kMostStages, "ranks");
  check_size(chunks_of(options), kMostStages / options.ranks, "chunks");
  check_size(
      options.microbatches,
      std::numeric_limits<uint32_t>::max(),
      "microbatches");
  if (options.kind == "none" && options.ranks != 1) {
    fail("1 rank for kind none", std::to_string(options.ranks), "ranks");
  }
  if (options.kind != "forward" && chunks_of(options) != 1) {
    fail(
        "1 chunk for kind " + options.kind,
        std::to_string(options.chunks),
        "chunks");
  }
}

// `warmup` forwards, then a backward after each further forward, then the
// backwards that are left. No warm-up is kind none, a warm-up of m is gpipe.
std::vector<Action> alternate(uint16_t stage, uint32_t m, uint32_t warmup) {
  std::vector<Action> row;
  row.reserve(size_t{2} * m);
  for (uint32_t i = 0; i < m + warmup; ++i) {
    if (i < m) {
      row.push_back({Op::kForward, 0, stage, i});
    }
    if (i >= warmup) {
      row.push_back({Op::kBackward, 0, stage, i - warmup});
    }
  }
  return row;
}

std::vector<Action>
forwards(const Schedule& schedule, uint32_t rank, uint32_t chunks) {
  std::vector<Action> row;
  row.reserve(size_t{chunks} * schedule.microbatches);
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    const auto stage = static_cast<uint16_t>(chunk * schedule.ranks + rank);
    for (uint32_t i = 0; i < schedule.microbatches; ++i) {
      row.push_back({Op::kForward, 0, stage, i});
    }
  }
  return row;
}

} // namespace

const std::vector<std::string>& kinds() {
  static const std::vector<std::string> names{
      "none", "gpipe", "1f1b", "forward"};
  return names;
}

Schedule plan(const PlanOptions& options) {
  check(options);
  Schedule schedule;
  schedule.kind = options.kind;
  schedule.ranks = static_cast<uint32_t>(options.ranks);
  schedule.stages = static_cast<uint32_t>(options.ranks * chunks_of(options));
  schedule.microbatches = static_cast<uint32_t>(options.microbatches);
  schedule.placement = loop_placement(schedule.ranks, schedule.stages);
  const uint32_t m = schedule.microbatches;
  for (uint32_t rank = 0; rank < schedule.ranks; ++rank) {
    if (options.kind == "forward") {
      schedule.rows.push_back(
          forwards(schedule, rank, static_cast<uint32_t>(chunks_of(options))));
      continue;
    }
    const uint32_t warmup = options.kind == "gpipe" ? m
                            : options.kind == "1f1b"
                                ? std::min(m, schedule.ranks - 1 - rank)
                                : 0;
    schedule.rows.push_back(alternate(static_cast<uint16_t>(rank), m, warmup));
  }
  return schedule;
}

} // namespace torch_sm3::pipeline
