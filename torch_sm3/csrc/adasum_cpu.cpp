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

std::vector<Tile> cut_into_tiles(c10::IntArrayRef sizes) {
  std::vector<Tile> tiles;
  int64_t layer_start = 0;
  for (size_t layer = 0; layer < sizes.size(); ++layer) {
    for (int64_t begin = 0; begin < sizes[layer]; begin += kTile) {
      tiles.push_back(
          {static_cast<int64_t>(layer),
           layer_start + begin,
           std::min(kTile, sizes[layer] - begin)});
    }
    layer_start += sizes[layer];
  }
  return tiles;
}

void gram_cpu(const Leaves& leaves, c10::IntArrayRef sizes, double* gram) {
  const int64_t p = leaves.p;
  const int64_t pairs = pair_count(p);
  const std::vector<Tile> tiles = cut_into_tiles(sizes);
  std::vector<double> partial(tiles.size() * static_cast<size_t>(pairs));
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
          partial.data() + t * pairs);
    }
  });
  std::fill_n(gram, static_cast<int64_t>(sizes.size()) * p * p, 0.0);
  for (size_t t = 0; t < tiles.size(); ++t) {
    double* layer = gram + tiles[t].layer * p * p;
    const double* sum = partial.data() + static_cast<int64_t>(t) * pairs;
    for (int64_t i = 0; i < p; ++i) {
      for (int64_t j = i; j < p; ++j) {
        layer[i * p + j] += *sum++;
      }
    }
  }
  for (size_t l = 0; l < sizes.size(); ++l) {
    double* layer = gram + static_cast<int64_t>(l) * p * p;
    for (int64_t i = 0; i < p; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        layer[i * p + j] = layer[j * p + i];
      }
    }
  }
}

void coefficients_cpu(
    const double* gram,
    int64_t layers,
    int64_t p,
    Mode mode,
    const double* weights,
    double scale,
    double* coefficients) {
  std::vector<int32_t> exponents(static_cast<size_t>(p));
  for (int64_t l = 0; l < layers; ++l) {
    adasum_layer_coefficients(
        gram + l * p * p,
        p,
        mode,
        weights,
        scale,
        exponents.data(),
        coefficients + l * p);
  }
}

void combine_cpu(
    const Leaves& leaves,
    const double* coefficients,
    c10::IntArrayRef sizes,
    void* out) {
  const std::vector<Tile> tiles = cut_into_tiles(sizes);
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
