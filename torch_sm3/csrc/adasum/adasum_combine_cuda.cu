// SPDX-License-Identifier: Apache-2.0
#include "adasum_combine_kernel.cuh"
#include "adasum_cuda.h"
#include "adasum_launch.cuh"

namespace torch_sm3::distributed::cuda {

void launch_combine(
    const LeafTable& leaves,
    const TileTable& tiles,
    ScalarKind from,
    const double* coefficients,
    void* out,
    ScalarKind to,
    Stream stream) {
  if (tiles.tiles == 0) {
    return;
  }
  with_type(from, [&](auto in) {
    with_type(to, [&](auto result) {
      using T = decltype(in);
      using O = decltype(result);
      combine<T, O>
          <<<static_cast<unsigned>(tiles.tiles), kCombineThreads, 0, stream>>>(
              leaves, tiles, coefficients, static_cast<O*>(out));
    });
  });
}

void launch_rescale(
    const void* in,
    ScalarKind from,
    const TileTable& tiles,
    const double* scales,
    void* out,
    ScalarKind to,
    Stream stream) {
  if (tiles.tiles == 0) {
    return;
  }
  with_type(from, [&](auto source) {
    with_type(to, [&](auto result) {
      using T = decltype(source);
      using O = decltype(result);
      rescale<T, O>
          <<<static_cast<unsigned>(tiles.tiles), kCombineThreads, 0, stream>>>(
              static_cast<const T*>(in), tiles, scales, static_cast<O*>(out));
    });
  });
}

void launch_encode(
    const LeafTable& leaves,
    const TileTable& tiles,
    ScalarKind from,
    const double* coefficients,
    void* out,
    double* scales,
    Stream stream) {
  if (tiles.tiles == 0) {
    return;
  }
  with_type(from, [&](auto in) {
    using T = decltype(in);
    encode<T>
        <<<static_cast<unsigned>(tiles.tiles), kEncodeThreads, 0, stream>>>(
            leaves, tiles, coefficients, static_cast<Half*>(out), scales);
  });
}

} // namespace torch_sm3::distributed::cuda
