// SPDX-License-Identifier: Apache-2.0
#include "adasum_cuda.h"

#include "adasum_kernel.cuh"
#include "adasum_launch.cuh"

namespace torch_sm3::distributed::cuda {
namespace {

/// Rows on each side of the blocks of more than so many rows.
constexpr int kMostRows = 8;

struct Dots {
  const LeafTable& leaves;
  const TileTable& tiles;
  const bool* flags;
  double* partial;
  Stream stream;

  template <class T, class A, int kEdge, bool kTriangle>
  void launch(int64_t blocks) const {
    const dim3 grid(
        static_cast<unsigned>(tiles.tiles), static_cast<unsigned>(blocks));
    dots<T, A, kEdge, kTriangle>
        <<<grid, kDotsThreads, 0, stream>>>(leaves, tiles, flags, partial);
  }

  // As few rows in registers as there are: registers are occupancy.
  template <class T, class A>
  void launch_all() const {
    if (leaves.p <= 2) {
      launch<T, A, 2, true>(1);
    } else if (leaves.p <= 4) {
      launch<T, A, 4, true>(1);
    } else {
      const int64_t blocks = (leaves.p + kMostRows - 1) / kMostRows;
      launch<T, A, kMostRows, true>(blocks);
      if (blocks > 1) {
        launch<T, A, kMostRows, false>(blocks * (blocks - 1) / 2);
      }
    }
  }
};

} // namespace

void launch_dots(
    const LeafTable& leaves,
    const TileTable& tiles,
    ScalarKind kind,
    bool float32,
    const bool* flags,
    double* partial,
    Stream stream) {
  if (tiles.tiles == 0) {
    return;
  }
  const Dots all{leaves, tiles, flags, partial, stream};
  with_type(kind, [&](auto like) {
    using T = decltype(like);
    if constexpr (sizeof(T) < sizeof(double)) {
      if (float32) {
        return all.launch_all<T, float>();
      }
    }
    all.launch_all<T, double>();
  });
}

void launch_add_tiles(
    const double* partial,
    int64_t layers,
    int64_t p,
    const TileTable& tiles,
    double* gram,
    Stream stream) {
  const int64_t entries = layers * p * p;
  if (entries > 0) {
    add_tiles<<<blocks_for(entries, kDotsThreads), kDotsThreads, 0, stream>>>(
        partial, layers, p, tiles, gram);
  }
}

} // namespace torch_sm3::distributed::cuda
