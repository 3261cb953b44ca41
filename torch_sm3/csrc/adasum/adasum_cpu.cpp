// SPDX-License-Identifier: Apache-2.0
#include "adasum_cpu.h"

#include "adasum_cpu_tiles.h"

#include <torch_sm3/library.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace torch_sm3::distributed {
namespace {

// Results of fewer elements are read again before they leave the caches.
constexpr int64_t kStreamedElements = int64_t{1} << 22;

// Of the calling thread; 0: those of at::parallel_for.
thread_local int most_threads = 0;

// Large results that do not overwrite a leaf leave the caches alone.
bool streams(
    const Leaves& leaves,
    const std::vector<Tile>& tiles,
    const void* out) {
  const int64_t elements =
      tiles.empty() ? 0 : tiles.back().start + tiles.back().size;
  bool apart = elements >= kStreamedElements;
  for (int64_t i = 0; i < leaves.p; ++i) {
    apart = apart && leaves.rows[i] != out;
  }
  return apart;
}

} // namespace

const AdasumKernels& adasum_kernels() {
#if defined(__x86_64__)
  switch (cpu_capability()) {
    case CpuCapability::kAvx512:
      return avx512::kAdasumKernels;
    case CpuCapability::kAvx2:
      return avx2::kAdasumKernels;
    default:
      break;
  }
#endif
  return scalar::kAdasumKernels;
}

int kernel_threads() {
  return most_threads;
}

int set_kernel_threads(int threads) {
  return std::exchange(most_threads, threads);
}

void dots_cpu(
    const Leaves& leaves,
    const std::vector<Tile>& tiles,
    double* partial,
    bool float32,
    const bool* flags) {
  const int64_t p = leaves.p;
  for_tiles(tiles, [&](int64_t first, int64_t last) {
    std::vector<double> scratch(static_cast<size_t>(dots_scratch(p)));
    for (int64_t t = first; t < last; ++t) {
      if (flags == nullptr || flags[tiles[t].layer]) {
        adasum_kernels().dots(
            rows_of(leaves, tiles[t], t),
            float32,
            scratch.data(),
            partial + t * pair_count(p));
      }
    }
  });
}

void add_tiles_cpu(
    const double* partial,
    c10::IntArrayRef tiles_of_layer,
    int64_t p,
    double* gram) {
  for (const int64_t tiles : tiles_of_layer) {
    std::fill_n(gram, p * p, 0.0);
    for (int64_t t = 0; t < tiles; ++t) {
      for (int64_t i = 0; i < p; ++i) {
        for (int64_t j = i; j < p; ++j) {
          gram[i * p + j] += *partial++;
        }
      }
    }
    for (int64_t i = 0; i < p; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        gram[i * p + j] = gram[j * p + i];
      }
    }
    gram += p * p;
  }
}

void combine_cpu(
    const Leaves& leaves,
    const double* coefficients,
    const std::vector<Tile>& tiles,
    void* out,
    ScalarKind kind) {
  const bool streamed = streams(leaves, tiles, out);
  for_tiles(tiles, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      adasum_kernels().combine(
          rows_of(leaves, tiles[t], t),
          coefficients + tiles[t].layer * leaves.p,
          element(out, tiles[t].start, kind),
          kind,
          streamed);
    }
  });
}

} // namespace torch_sm3::distributed
