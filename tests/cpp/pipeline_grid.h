// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Pipelines side by side: replicas with the same stages on each.

#include "pipeline_ranks.h"

#ifdef TORCH_SM3_TEST_GLOO

#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace torch_sm3::pipeline {

/// Where a thread stands in the grid.
struct Place {
  int rank = 0;
  int replica = 0;
  distributed::Group pipeline; ///< the ranks of this replica
  distributed::Group replicas; ///< the same rank of all replicas
};

/// Runs `work` on each rank of each replica, a thread of this process; the
/// texts of their errors.
inline std::vector<std::string> on_grid(
    int ranks,
    int replicas,
    const std::function<void(const Place& place)>& work) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> errors(static_cast<size_t>(ranks * replicas));
  std::vector<std::thread> threads;
  for (int i = 0; i < ranks * replicas; ++i) {
    threads.emplace_back([&, i] {
      at::set_num_threads(1);
      const auto group = [&](const std::string& name, int rank, int size) {
        return distributed::make_group(
            c10::make_intrusive<c10d::PrefixStore>(name, store),
            rank,
            size,
            std::chrono::seconds(120));
      };
      try {
        const int rank = i % ranks;
        const int replica = i / ranks;
        work(
            {rank,
             replica,
             group(c10::str("pipeline", replica), rank, ranks),
             group(c10::str("replicas", rank), replica, replicas)});
      } catch (const c10::Error& error) {
        errors[static_cast<size_t>(i)] = error.what_without_backtrace();
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(i)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return errors;
}

} // namespace torch_sm3::pipeline

#endif
