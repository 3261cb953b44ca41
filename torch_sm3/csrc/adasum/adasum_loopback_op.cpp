// SPDX-License-Identifier: Apache-2.0

/// \file
/// Private operators that run an algorithm with all ranks inside this process,
/// one thread each: for tests and simulations.

#include "adasum_algorithms.h"
#include "adasum_loopback.h"
#include "adasum_ops.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <chrono>
#include <exception>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace torch_sm3::distributed {
namespace {

constexpr const char* kOp = "_adasum_loopback";
constexpr std::chrono::minutes kTimeout{5};

Algorithm algorithm_of(std::string_view name) {
  constexpr const char* names[] = {
      "auto", "pair", "gather", "gram", "two_level", "vhdd"};
  for (size_t k = 0; k < std::size(names); ++k) {
    if (name == names[k]) {
      return static_cast<Algorithm>(k);
    }
  }
  TORCH_CHECK_VALUE(
      false,
      kOp,
      ": expected 'auto', 'pair', 'gather', 'gram', 'two_level' or 'vhdd', but "
      "got '",
      name,
      "' (argument 'algorithm')");
}

std::optional<c10::ScalarType> wire_of(std::string_view name) {
  if (name.empty()) {
    return std::nullopt;
  }
  return name == "float16" ? at::kHalf : at::kBFloat16;
}

/// All ranks of all shards; rank r of shard s has row s * ranks + r.
struct Simulation {
  const Plan& plan;
  Algorithm algorithm;
  int ranks;
  int shards;
  int local_world_size;
  at::Tensor leaves, results; // [shards * ranks, N]
  std::vector<std::unique_ptr<Transport>> transports, shard_transports;
  std::vector<Outcome> outcomes;

  void run_rank(int row);
  void run();
};

void Simulation::run_rank(int row) {
  const at::NoGradGuard no_grad;
  Scratch scratch;
  run_algorithm(
      algorithm,
      {plan,
       leaves[row],
       results[row],
       *transports[row],
       shards > 1 ? shard_transports[row].get() : nullptr,
       scratch,
       /*call=*/1,
       kOp,
       &outcomes[row],
       local_world_size});
}

// A rank that fails takes those with it that wait for it: what they say comes
// last.
void rethrow_cause(const std::vector<std::exception_ptr>& failures) {
  std::exception_ptr consequence;
  for (const std::exception_ptr& failure : failures) {
    if (failure != nullptr) {
      try {
        std::rethrow_exception(failure);
      } catch (const c10::DistBackendError&) {
        consequence = failure;
      }
    }
  }
  if (consequence != nullptr) {
    std::rethrow_exception(consequence);
  }
}

void Simulation::run() {
  // A shard's rows meet in one group, the rows of one rank in another one.
  const size_t all = static_cast<size_t>(shards) * static_cast<size_t>(ranks);
  transports.resize(all);
  shard_transports.resize(all);
  for (int shard = 0; shard < shards; ++shard) {
    auto group = loopback_transports(ranks, kTimeout);
    for (int rank = 0; rank < ranks; ++rank) {
      transports[shard * ranks + rank] = std::move(group[rank]);
    }
  }
  for (int rank = 0; rank < ranks; ++rank) {
    auto group = loopback_transports(shards, kTimeout);
    for (int shard = 0; shard < shards; ++shard) {
      shard_transports[shard * ranks + rank] = std::move(group[shard]);
    }
  }
  outcomes.resize(all);
  std::vector<std::exception_ptr> failures(all);
  std::vector<std::thread> threads;
  for (int row = 0; row < shards * ranks; ++row) {
    threads.emplace_back([this, row, &failures] {
      try {
        run_rank(row);
      } catch (...) {
        failures[row] = std::current_exception();
        // Whoever waits for this rank fails too.
        transports[row].reset();
        shard_transports[row].reset();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  rethrow_cause(failures);
}

using Answer = std::tuple<
    at::Tensor,
    at::Tensor,
    at::Tensor,
    at::Tensor,
    at::Tensor,
    std::vector<int64_t>>;

Answer loopback(
    const at::Tensor& stack,
    at::IntArrayRef sizes,
    std::string_view mode,
    std::string_view algorithm,
    double scale,
    at::ArrayRef<double> weights,
    int64_t node_size,
    std::string_view inner,
    const c10::List<bool>& means,
    std::string_view accumulate,
    std::string_view wire,
    std::optional<c10::ScalarType> result_dtype,
    bool wide_result,
    int64_t scratch_bytes,
    int64_t shards,
    int64_t local_world_size) {
  check_stack(stack, kOp);
  check_sizes(sizes, stack.size(1), kOp);
  Plan plan{Layout(sizes.vec())};
  plan.rule.mode = parse_mode(mode, kOp);
  plan.rule.scale = scale;
  plan.rule.weights = weights.vec();
  plan.rule.node_size = node_size;
  plan.rule.inner = inner == "adasum" ? Inner::adasum : Inner::mean;
  plan.means.assign(means.begin(), means.end());
  plan.algorithm = algorithm_of(algorithm);
  plan.accumulate =
      accumulate == "float32" ? Accumulate::kFloat32 : Accumulate::kFloat64;
  plan.wire = wire_of(wire);
  plan.wide_result = wide_result;
  plan.scratch_bytes = scratch_bytes;
  const int ranks = static_cast<int>(stack.size(0) / shards);
  const auto bytes = static_cast<int64_t>(stack.size(1) * stack.element_size());
  const int machine = static_cast<int>(local_world_size);
  const at::Tensor leaves = stack.contiguous().clone();
  // In place, unless the result is of another dtype.
  const at::Tensor results =
      result_dtype.has_value()
          ? at::empty(leaves.sizes(), leaves.options().dtype(result_dtype))
          : leaves;
  Simulation simulation{
      plan,
      choose_algorithm(plan, ranks, machine, /*alike=*/true, bytes, kOp),
      ranks,
      static_cast<int>(shards),
      machine,
      leaves,
      results,
      {},
      {},
      {}};
  simulation.run();
  const Outcome& first = simulation.outcomes[0];
  const auto or_empty = [&](const at::Tensor& tensor) {
    return tensor.defined()
               ? tensor
               : at::empty({0}, leaves.options().dtype(at::kDouble));
  };
  return {
      results,
      or_empty(first.gram),
      or_empty(first.coefficients),
      or_empty(first.report),
      or_empty(first.cosines),
      {static_cast<int64_t>(simulation.algorithm),
       first.bytes_sent,
       first.messages_sent}};
}

} // namespace

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.def(
      "_adasum_loopback(Tensor stack, int[] sizes, "
      "str mode=\"tree\", str algorithm=\"auto\", *, float scale=1., "
      "float[] weights=[], int node_size=0, str inner=\"mean\", "
      "bool[] means=[], str accumulate=\"float64\", str wire=\"\", "
      "ScalarType? result_dtype=None, bool wide_result=False, "
      "int scratch_bytes=67108864, int shards=1, int local_world_size=0) "
      "-> (Tensor results, Tensor gram, Tensor coefficients, Tensor report, "
      "Tensor cosines, int[] traffic)");
}

TORCH_LIBRARY_IMPL(torch_sm3, CompositeExplicitAutograd, m) {
  m.impl("_adasum_loopback", &loopback);
}

} // namespace torch_sm3::distributed
