// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// How the CPU functions of Adasum share their tiles among threads. For files
/// that are compiled with OpenMP only (see torch_sm3_threaded_sources).

#include "adasum_cpu.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cfenv>
#include <cstdint>
#include <vector>

namespace torch_sm3::distributed {

/// The kernels of this machine's instruction set.
const AdasumKernels& adasum_kernels();

/// What `set_kernel_threads` set.
int kernel_threads();

/// Below this number of elements threads cost more than they save.
inline constexpr int64_t kSerialElements = 32768;

/// Rounding and the flushing of subnormals as another thread has them.
class EnvironmentGuard {
 public:
  explicit EnvironmentGuard(const std::fenv_t& other) {
    std::fegetenv(&own_);
    std::fesetenv(&other);
  }
  EnvironmentGuard(const EnvironmentGuard&) = delete;
  EnvironmentGuard& operator=(const EnvironmentGuard&) = delete;
  ~EnvironmentGuard() {
    std::fesetenv(&own_);
  }

 private:
  std::fenv_t own_{};
};

/// Calls `function(first, last)` for runs of `count` pieces of work.
template <class Function>
void in_parallel(int64_t count, int64_t elements, const Function& function) {
  const int most_threads = kernel_threads();
  const int64_t threads = most_threads > 0 ? most_threads : count;
  const int64_t grain =
      elements <= kSerialElements
          ? count
          : (count + threads - 1) / std::max<int64_t>(threads, 1);
  std::fenv_t environment;
  std::fegetenv(&environment);
  at::parallel_for(
      0, count, std::max<int64_t>(grain, 1), [&](int64_t first, int64_t last) {
        const EnvironmentGuard guard(environment);
        function(first, last);
      });
}

template <class Function>
void for_tiles(const std::vector<Tile>& tiles, const Function& function) {
  int64_t elements = 0;
  for (const Tile& tile : tiles) {
    elements += tile.size;
  }
  in_parallel(static_cast<int64_t>(tiles.size()), elements, function);
}

inline TileRows rows_of(const Leaves& leaves, const Tile& tile, int64_t t) {
  const double* scales =
      leaves.scales == nullptr ? nullptr : leaves.scales + t * leaves.p;
  return {leaves.rows, leaves.p, leaves.kind, scales, tile.start, tile.size};
}

inline const void* element(const void* data, int64_t index, ScalarKind kind) {
  return static_cast<const char*>(data) + index * size_of(kind);
}

inline void* element(void* data, int64_t index, ScalarKind kind) {
  return static_cast<char*>(data) + index * size_of(kind);
}

} // namespace torch_sm3::distributed
