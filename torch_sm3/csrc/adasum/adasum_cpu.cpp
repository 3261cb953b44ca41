// SPDX-License-Identifier: Apache-2.0
#include "adasum_cpu.h"

#include <torch_sm3/library.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace torch_sm3::distributed {
namespace {

// Below this number of elements threads cost more than they save.
constexpr int64_t kSerialElements = 32768;

const AdasumKernels& kernels() {
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

template <class Function>
void for_tiles(const std::vector<Tile>& tiles, const Function& function) {
  const int64_t count = static_cast<int64_t>(tiles.size());
  int64_t elements = 0;
  for (const Tile& tile : tiles) {
    elements += tile.size;
  }
  const int64_t grain =
      elements <= kSerialElements ? std::max<int64_t>(count, 1) : 1;
  at::parallel_for(0, count, grain, function);
}

} // namespace

void dots_cpu(
    const Leaves& leaves,
    const std::vector<Tile>& tiles,
    double* partial) {
  const int64_t p = leaves.p;
  for_tiles(tiles, [&](int64_t first, int64_t last) {
    std::vector<double> scratch(static_cast<size_t>(dots_scratch(p)));
    for (int64_t t = first; t < last; ++t) {
      kernels().dots(
          leaves.rows,
          p,
          leaves.kind,
          tiles[t].start,
          tiles[t].size,
          scratch.data(),
          partial + t * pair_count(p));
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

void gram_cpu(const Leaves& leaves, c10::IntArrayRef sizes, double* gram) {
  const Layout layout(sizes.vec());
  std::vector<double> partial(
      layout.tiles().size() * static_cast<size_t>(pair_count(leaves.p)));
  dots_cpu(leaves, layout.tiles(), partial.data());
  std::vector<int64_t> tiles_of_layer;
  for (int64_t layer = 0; layer < layout.layers(); ++layer) {
    tiles_of_layer.push_back(layout.tiles_of(layer).size());
  }
  add_tiles_cpu(partial.data(), tiles_of_layer, leaves.p, gram);
}

void combine_cpu(
    const Leaves& leaves,
    const double* coefficients,
    const std::vector<Tile>& tiles,
    void* out) {
  for_tiles(tiles, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      kernels().combine(
          leaves.rows,
          leaves.p,
          coefficients + tiles[t].layer * leaves.p,
          leaves.kind,
          tiles[t].start,
          tiles[t].size,
          out);
    }
  });
}

} // namespace torch_sm3::distributed
