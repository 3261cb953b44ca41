// SPDX-License-Identifier: Apache-2.0
#include "adasum_algorithms.h"

#include <c10/util/Exception.h>

#include <bit>

namespace torch_sm3::distributed {
namespace {

// All leaves of so small a bucket go to all ranks in one step.
constexpr int64_t kGatherBytes = int64_t{128} << 10;
// Two ranks that own halves compute half as much as two that swap everything,
// but need two more steps.
constexpr int64_t kPairBytes = int64_t{16} << 20;
constexpr int kGramRanks = 16;
constexpr int kTwoLevelRanks = 64;

bool is_power_of_two(int64_t number) {
  return number > 0 && std::has_single_bit(static_cast<uint64_t>(number));
}

// Ranks that exchange leaves: those of a node where nodes are combined first.
int nodes_of(const Rule& rule, int ranks) {
  return has_node_means(rule, ranks) ? ranks / static_cast<int>(rule.node_size)
                                     : ranks;
}

// Whether the tree over runs is the tree over ranks, and needs no more than the
// inner products inside runs and between them.
bool splits_into_runs(const Rule& rule, int ranks) {
  const bool flat = rule.node_size <= 1 || rule.inner == Inner::adasum;
  const bool even = rule.node_size == 0 || ranks % rule.node_size == 0;
  return flat && even && rule.mode != Mode::psum;
}

// The tree of halves is that of the nodes as well.
bool splits_into_halves(const Rule& rule, int ranks) {
  const bool plain = rule.node_size <= 1 || (rule.inner == Inner::adasum &&
                                             is_power_of_two(rule.node_size));
  return plain && is_power_of_two(ranks) && rule.mode != Mode::psum;
}

Algorithm choose(
    const Plan& plan,
    int ranks,
    int local_world_size,
    bool alike,
    int64_t bytes) {
  const Rule& rule = plan.rule;
  const int leaves = nodes_of(rule, ranks);
  if (ranks == 1) {
    return Algorithm::gather;
  }
  if (alike && leaves == 2 && bytes <= kPairBytes) {
    return Algorithm::pair;
  }
  if (alike && (leaves - 1) * bytes <= kGatherBytes) {
    return Algorithm::gather;
  }
  if (ranks > kTwoLevelRanks && splits_into_halves(rule, ranks)) {
    return Algorithm::vhdd;
  }
  if (ranks > kGramRanks && splits_into_runs(rule, ranks) &&
      ranks_per_run(rule, ranks, local_world_size) > 1) {
    return Algorithm::two_level;
  }
  return Algorithm::gram;
}

} // namespace

bool has_node_means(const Rule& rule, int ranks) {
  return rule.inner == Inner::mean && rule.node_size > 1 &&
         rule.node_size < ranks && ranks % rule.node_size == 0;
}

int ranks_per_run(const Rule& rule, int ranks, int local_world_size) {
  if (rule.inner == Inner::adasum && rule.node_size > 1) {
    return rule.node_size < ranks && ranks % rule.node_size == 0
               ? static_cast<int>(rule.node_size)
               : 1;
  }
  if (is_power_of_two(local_world_size) && local_world_size > 1 &&
      local_world_size < ranks && ranks % local_world_size == 0) {
    return local_world_size;
  }
  int run = 1;
  while (4 * run * run <= ranks && ranks % (2 * run) == 0) {
    run *= 2;
  }
  return run;
}

Algorithm choose_algorithm(
    const Plan& plan,
    int ranks,
    int local_world_size,
    bool alike,
    int64_t bytes,
    const char* op) {
  const Rule& rule = plan.rule;
  const int leaves = nodes_of(rule, ranks);
  const bool nodes = leaves != ranks;
  const char* of = nodes ? " nodes" : "";
  switch (plan.algorithm) {
    case Algorithm::automatic:
      return choose(plan, ranks, local_world_size, alike, bytes);
    case Algorithm::pair:
      TORCH_CHECK_VALUE(
          leaves == 2,
          op,
          ": expected a group of 2",
          nodes ? " nodes" : " ranks",
          " for algorithm 'pair', but got ",
          leaves,
          " (argument 'algorithm')");
      [[fallthrough]];
    case Algorithm::gather:
      TORCH_CHECK_VALUE(
          alike || ranks == 1,
          op,
          ": expected the same build of torch_sm3, device type and instruction "
          "set on all ranks for algorithm '",
          plan.algorithm == Algorithm::pair ? "pair" : "gather",
          "', but got unlike ranks (argument 'algorithm')");
      break;
    case Algorithm::gram:
      break;
    case Algorithm::two_level:
      TORCH_CHECK_VALUE(
          rule.mode != Mode::psum,
          op,
          ": expected mode 'tree', 'mean' or 'sum' for algorithm 'two_level', "
          "but got 'psum' (argument 'algorithm')");
      TORCH_CHECK_VALUE(
          splits_into_runs(rule, ranks) &&
              ranks_per_run(rule, ranks, local_world_size) > 1,
          op,
          ": expected a group of q * m ranks, q a power of two, without means "
          "of nodes, for algorithm 'two_level', but got ",
          ranks,
          of,
          " (argument 'algorithm')");
      break;
    case Algorithm::vhdd:
      TORCH_CHECK_VALUE(
          rule.mode != Mode::psum,
          op,
          ": expected mode 'tree', 'mean' or 'sum' for algorithm 'vhdd', but "
          "got 'psum' (argument 'algorithm')");
      TORCH_CHECK_VALUE(
          splits_into_halves(rule, ranks),
          op,
          ": expected a group of 2^k ranks for algorithm 'vhdd', but got ",
          ranks,
          " (argument 'algorithm')");
      break;
  }
  return plan.algorithm;
}

} // namespace torch_sm3::distributed
