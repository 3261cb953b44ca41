// SPDX-License-Identifier: Apache-2.0
// The row of one rank, without the others: how much memory that takes.
#include <torch_sm3/pipeline/planner.h>

#include <gtest/gtest.h>

#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <new>

namespace {

// Bytes in use, and the most of them, of this process' own operator new.
size_t live = 0;
size_t most = 0;

// Not inlined: the compiler would see malloc's memory go to delete.
[[gnu::noinline]] void* take(size_t size) {
  void* const memory = std::malloc(size);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  live += malloc_usable_size(memory);
  most = std::max(most, live);
  return memory;
}

[[gnu::noinline]] void give_back(void* memory) {
  live -= malloc_usable_size(memory);
  std::free(memory);
}

} // namespace

void* operator new(size_t size) {
  return take(size);
}

void operator delete(void* memory) noexcept {
  give_back(memory);
}

void operator delete(void* memory, size_t) noexcept {
  give_back(memory);
}

namespace torch_sm3::pipeline {
namespace {

// Most bytes that a call takes beside what was there before.
template <class Call>
size_t taken(const Call& call) {
  const size_t before = live;
  most = live;
  call();
  return most - before;
}

TEST(PlannerRank, TakesMemoryForItsOwnRowOnly) {
  constexpr int64_t kRanks = 64;
  constexpr int64_t kMicrobatches = 256;
  for (const std::string& kind : kinds()) {
    if (kind == "none" || kind == "auto") {
      continue; // one row is the whole; a search plans the whole
    }
    const PlanOptions options{
        .kind = kind, .ranks = kRanks, .microbatches = kMicrobatches};
    size_t row = 0;
    for (const int64_t rank : {int64_t{0}, kRanks / 2, kRanks - 1}) {
      const size_t bytes = taken(
          [&] { row = sizeof(Action) * plan_rank(options, rank).size(); });
      // The row, what weight gradients are owed, a few counters of each rank.
      EXPECT_LE(bytes, 2 * row + 128 * kRanks + 4096) << kind << " " << rank;
    }
    EXPECT_GE(taken([&] { plan(options); }), kRanks * row) << kind;
  }
}

} // namespace
} // namespace torch_sm3::pipeline
