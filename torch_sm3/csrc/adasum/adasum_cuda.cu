// SPDX-License-Identifier: Apache-2.0
#include "adasum_cuda.h"

#include "adasum_kernel.cuh"

namespace torch_sm3::distributed::cuda {
namespace {

TileTable unpack(const Shape& shape) {
  const int64_t* table = shape.table;
  return {
      table,
      table + shape.tiles,
      table + 2 * shape.tiles,
      table + 3 * shape.tiles};
}

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

template <class T>
void dots_of(
    const void* stack,
    const Shape& shape,
    double* partial,
    Stream stream) {
  const dim3 grid(
      static_cast<unsigned>(shape.tiles),
      static_cast<unsigned>(pair_count(shape.p)));
  dots<T><<<grid, kThreads, 0, stream>>>(
      static_cast<const T*>(stack), shape.p, shape.n, unpack(shape), partial);
}

template <class T>
void combine_of(
    const void* stack,
    const Shape& shape,
    const double* coefficients,
    void* out,
    Stream stream) {
  combine<T><<<static_cast<unsigned>(shape.tiles), kThreads, 0, stream>>>(
      static_cast<const T*>(stack),
      shape.p,
      shape.n,
      coefficients,
      unpack(shape),
      static_cast<T*>(out));
}

} // namespace

void launch_gram(
    const void* stack,
    ScalarKind kind,
    const Shape& shape,
    double* partial,
    double* gram,
    Stream stream) {
  if (shape.tiles > 0) {
    switch (kind) {
      case ScalarKind::kFloat32:
        dots_of<float>(stack, shape, partial, stream);
        break;
      case ScalarKind::kFloat64:
        dots_of<double>(stack, shape, partial, stream);
        break;
      case ScalarKind::kFloat16:
        dots_of<Half>(stack, shape, partial, stream);
        break;
      case ScalarKind::kBFloat16:
        dots_of<BFloat16>(stack, shape, partial, stream);
        break;
    }
  }
  const int64_t entries = shape.layers * shape.p * shape.p;
  if (entries > 0) {
    add_tiles<<<blocks_for(entries), kThreads, 0, stream>>>(
        partial, shape.layers, shape.p, unpack(shape), gram);
  }
}

void launch_combine(
    const void* stack,
    ScalarKind kind,
    const Shape& shape,
    const double* coefficients,
    void* out,
    Stream stream) {
  if (shape.tiles == 0) {
    return;
  }
  switch (kind) {
    case ScalarKind::kFloat32:
      return combine_of<float>(stack, shape, coefficients, out, stream);
    case ScalarKind::kFloat64:
      return combine_of<double>(stack, shape, coefficients, out, stream);
    case ScalarKind::kFloat16:
      return combine_of<Half>(stack, shape, coefficients, out, stream);
    case ScalarKind::kBFloat16:
      return combine_of<BFloat16>(stack, shape, coefficients, out, stream);
  }
}

} // namespace torch_sm3::distributed::cuda
