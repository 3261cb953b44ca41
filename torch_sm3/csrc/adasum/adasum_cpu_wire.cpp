// SPDX-License-Identifier: Apache-2.0
#include "adasum_cpu.h"

#include "adasum_cpu_tiles.h"
#include "adasum_scales.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

namespace torch_sm3::distributed {
namespace {

// Bytes of one piece of work of the hash.
constexpr int64_t kHashedBytes = int64_t{1} << 16;
constexpr int64_t kWord = sizeof(uint64_t);

// Rounds one tile to float16 times a power of two, which is returned.
double encode_tile(const void* in, ScalarKind from, int64_t size, void* out) {
  const AdasumKernels& kernels = adasum_kernels();
  // Elements that are not finite stay what they are, whatever the others need.
  const int32_t shift = float16_shift(kernels.largest(in, from, size).finite);
  kernels.rescale(
      in, from, size, power_of_two(-shift), out, ScalarKind::kFloat16);
  return power_of_two(shift);
}

} // namespace

void encode_float16_cpu(
    const void* in,
    ScalarKind from,
    const std::vector<Tile>& tiles,
    void* out,
    double* scales) {
  for_tiles(tiles, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const Tile& tile = tiles[t];
      scales[t] = encode_tile(
          element(in, tile.start, from),
          from,
          tile.size,
          element(out, tile.start, ScalarKind::kFloat16));
    }
  });
}

void combine_float16_cpu(
    const Leaves& leaves,
    const double* coefficients,
    const std::vector<Tile>& tiles,
    void* out,
    double* scales) {
  for_tiles(tiles, [&](int64_t first, int64_t last) {
    std::vector<double> sums(static_cast<size_t>(kTile));
    for (int64_t t = first; t < last; ++t) {
      const Tile& tile = tiles[t];
      adasum_kernels().combine(
          rows_of(leaves, tile, t),
          coefficients + tile.layer * leaves.p,
          sums.data(),
          ScalarKind::kFloat64,
          false);
      scales[t] = encode_tile(
          sums.data(),
          ScalarKind::kFloat64,
          tile.size,
          element(out, tile.start, ScalarKind::kFloat16));
    }
  });
}

void rescale_cpu(
    const void* in,
    ScalarKind from,
    const std::vector<Tile>& tiles,
    const double* scales,
    void* out,
    ScalarKind to) {
  for_tiles(tiles, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      adasum_kernels().rescale(
          element(in, tiles[t].start, from),
          from,
          tiles[t].size,
          scales == nullptr ? 1.0 : scales[t],
          element(out, tiles[t].start, to),
          to);
    }
  });
}

void exponents_cpu(
    const Leaves& leaves,
    const std::vector<Tile>& tiles,
    const bool* flags,
    int32_t* exponents) {
  for_tiles(tiles, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const Tile& tile = tiles[t];
      const bool wanted = flags == nullptr || flags[tile.layer];
      for (int64_t i = 0; i < leaves.p; ++i) {
        int32_t exponent = kNoExponent;
        if (wanted) {
          const Largest largest = adasum_kernels().largest(
              element(leaves.rows[i], tile.start, leaves.kind),
              leaves.kind,
              tile.size);
          const double scale =
              leaves.scales == nullptr ? 1.0 : leaves.scales[t * leaves.p + i];
          exponent = scaled_exponent(largest.finite, largest.all_finite, scale);
        }
        exponents[t * leaves.p + i] = exponent;
      }
    }
  });
}

uint64_t hash_cpu(const void* data, int64_t bytes) {
  const auto* begin = static_cast<const char*>(data);
  const int64_t words = bytes / kWord;
  const int64_t pieces = (bytes + kHashedBytes - 1) / kHashedBytes;
  constexpr int64_t kWords = kHashedBytes / kWord;
  std::atomic<uint64_t> sum = 0;
  in_parallel(pieces, bytes, [&](int64_t first, int64_t last) {
    sum += adasum_kernels().hash(
        data, first * kWords, std::min(last * kWords, words));
  });
  uint64_t rest = 0;
  if (words * kWord < bytes) {
    std::memcpy(&rest, begin + words * kWord, bytes - words * kWord);
  }
  return sum + hash_word(rest, words) + hash_word(bytes, -1);
}

} // namespace torch_sm3::distributed
