// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Launches of the CUDA kernels: raw pointers and a stream.

#include "scalar_math.h"

#include <cstdint>

struct CUstream_st;

namespace torch_sm3::distributed::cuda {

using Stream = CUstream_st*;

/// Layers and tiles; `table` is int64 [3 T + L + 1]: start, size, layer of each
/// tile, then the first tile of each layer.
struct Shape {
  int64_t p, n, layers, tiles;
  const int64_t* table;
};

/// Writes the Gram matrices [L, p, p]; `partial` is float64 [T, p (p + 1) / 2].
void launch_gram(
    const void* stack,
    ScalarKind kind,
    const Shape& shape,
    double* partial,
    double* gram,
    Stream stream);

/// Writes the sum of the rows with their coefficients, [N].
void launch_combine(
    const void* stack,
    ScalarKind kind,
    const Shape& shape,
    const double* coefficients,
    void* out,
    Stream stream);

} // namespace torch_sm3::distributed::cuda
