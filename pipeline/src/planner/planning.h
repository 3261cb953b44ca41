// SPDX-License-Identifier: Apache-2.0
// What the planner's families share. A family fills the rows of some ranks;
// each rank's row depends on nothing but the sizes.
#pragma once

#include <torch_sm3/pipeline/planner.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

struct Sizes {
  uint32_t ranks = 1;
  uint32_t chunks = 1;
  uint32_t microbatches = 1;
};

// Ranks from `first` up to, not including, `last`.
struct RankRange {
  uint32_t first = 0;
  uint32_t last = 0;

  bool holds(uint32_t rank) const {
    return first <= rank && rank < last;
  }
};

using Row = std::vector<Action>;
using Rows = std::vector<Row>;

inline Action
compute(Op op, uint32_t stage, uint32_t microbatch, uint8_t flags = 0) {
  return {op, flags, static_cast<uint16_t>(stage), microbatch};
}

// Throws std::invalid_argument.
[[noreturn]] void refuse_plan(
    const std::string& expected,
    const std::string& got,
    const char* argument);

// Says so with the nearest name.
[[noreturn]] void refuse_kind(const std::string& name);

// Stages per rank of a kind: the usual number, or any.
struct ChunkRule {
  uint32_t usual = 1;
  bool any = false;
};

void check_rank(const PlanOptions& options, int64_t rank);
Sizes check_sizes(const PlanOptions& options, ChunkRule rule);
// Everything but the sizes and the costs.
void check_options(const PlanOptions& options, int64_t stages);

// limits.cpp: whether a schedule must be looked at as a whole, and the
// look: what cannot run or does not fit becomes a ScheduleError, or is changed
// until it fits.
bool needs_whole(const PlanOptions& options);
Schedule settle(const PlanOptions& options, Schedule schedule);

// The links that memory is counted for.
LinkModel held_links(const PlanOptions& options);

// 1f1b.cpp: none, gpipe, 1f1b. `warmups` of the ranks of the range.
Rows alternating_rows(
    const Sizes& sizes,
    RankRange range,
    const std::vector<uint32_t>& warmups);
// Forwards of warm-up per rank below: one, and those that pass while a message
// goes down and its answer comes back.
uint64_t warmup_rounds(const PlanOptions& options);
// Forwards of each rank before its first backward.
std::vector<uint32_t> warmups_1f1b(const PlanOptions& options, RankRange range);

// interleaved.cpp
uint32_t automatic_group(uint32_t ranks, uint32_t microbatches);
Rows interleaved_rows(const Sizes& sizes, RankRange range, uint32_t group);
Rows looped_rows(const Sizes& sizes, RankRange range, bool backwards);

// zero_bubble.cpp: zb_h1, zb_h2.
Rows zero_bubble_rows(const Sizes& sizes, RankRange range, bool long_warmup);

// v_placement.cpp: zbv, v_half, v_min.
enum class VKind : uint8_t { kZeroBubble, kHalf, kMin };
// What a rank may hold beyond its kind: of both chunks, and of the first. For
// the search; the kinds themselves have none.
struct VRoom {
  uint32_t chunks = 0;
  uint32_t first = 0;
};
Rows v_rows(const Sizes& sizes, RankRange range, VKind kind, VRoom more = {});

// dualpipe.cpp
Rows dualpipe_rows(const Sizes& sizes, RankRange range);

} // namespace torch_sm3::pipeline
