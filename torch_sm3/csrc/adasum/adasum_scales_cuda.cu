// SPDX-License-Identifier: Apache-2.0
#include "adasum_cuda.h"
#include "adasum_launch.cuh"
#include "adasum_scales_kernel.cuh"

#include <algorithm>

namespace torch_sm3::distributed::cuda {
namespace {

// Enough blocks to fill any device; more of them only add atomics.
constexpr int64_t kMostHashBlocks = 1024;

} // namespace

void launch_exponents(
    const LeafTable& leaves,
    const TileTable& tiles,
    ScalarKind kind,
    const bool* flags,
    int32_t* out,
    Stream stream) {
  if (tiles.tiles == 0) {
    return;
  }
  const dim3 grid(
      static_cast<unsigned>(tiles.tiles), static_cast<unsigned>(leaves.p));
  with_type(kind, [&](auto like) {
    exponents<decltype(like)>
        <<<grid, kScalesThreads, 0, stream>>>(leaves, tiles, flags, out);
  });
}

void launch_shifts(
    const int32_t* exponents,
    const TileTable& tiles,
    int64_t layers,
    int64_t p,
    int32_t* out,
    Stream stream) {
  if (layers > 0) {
    shifts<<<
        blocks_for(layers * p, kScalesThreads),
        kScalesThreads,
        0,
        stream>>>(exponents, tiles, layers, p, out);
  }
}

void launch_second_scales(
    const double* before,
    const int32_t* shifts,
    const TileTable& tiles,
    int64_t p,
    double* out,
    Stream stream) {
  if (tiles.tiles > 0) {
    second_scales<<<
        blocks_for(tiles.tiles * p, kScalesThreads),
        kScalesThreads,
        0,
        stream>>>(before, shifts, tiles, p, out);
  }
}

void launch_second_pass(
    const double* gram,
    int64_t layers,
    int64_t p,
    bool float32,
    bool* flags,
    Stream stream) {
  if (layers > 0) {
    second_pass<<<
        blocks_for(layers, kScalesThreads),
        kScalesThreads,
        0,
        stream>>>(gram, layers, p, float32, flags);
  }
}

void launch_hash(const void* data, int64_t bytes, int64_t* sum, Stream stream) {
  cudaMemsetAsync(sum, 0, sizeof(*sum), stream);
  const int64_t blocks = blocks_for(bytes / 8 + 1, kScalesThreads);
  hash<<<
      static_cast<unsigned>(std::min(blocks, kMostHashBlocks)),
      kScalesThreads,
      0,
      stream>>>(
      static_cast<const unsigned char*>(data),
      bytes,
      reinterpret_cast<unsigned long long*>(sum));
}

} // namespace torch_sm3::distributed::cuda
