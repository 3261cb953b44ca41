// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// CUDA kernels of SM3 for the rows that a sparse gradient names, one thread
/// per element. New numbers go through scratch memory of which only touched
/// places are ever written or read, so that the cost is that of the gradient.

#include <sm3_part_kernel.cuh>
#include <sm3_step_kernel.cuh>
#include <sm3_tile_kernel.cuh>

#include <cstdio>

namespace torch_sm3 {

/// One element of a parameter, as a part.
struct SM3One {
  static constexpr int kCount = 1;
  int64_t position;

  __device__ __forceinline__ bool has(int) const {
    return true;
  }
  __device__ __forceinline__ int column_of(int) const {
    return 0;
  }
  __device__ __forceinline__ int64_t element(int) const {
    return position;
  }
  __device__ __forceinline__ int64_t
  base(const SM3DeviceStrided& t, const int64_t* numbers) const {
    return sm3_offset(t, numbers, position);
  }
};

// The element of the parameter that element `i` of the values belongs to.
TORCH_SM3_DEVICE int64_t sm3_sparse_position(
    const SM3SparseRows& rows,
    const int64_t* numbers,
    int64_t i) {
  const int64_t n = i / rows.chunk;
  int64_t row = 0;
  for (int d = 0; d < rows.dims; ++d) {
    const int64_t size = numbers[rows.sizes + d];
    const int64_t index =
        rows.indices[d * rows.dim_stride + n * rows.row_stride];
    if (index < 0 || index >= size) {
      printf(
          "sm3_sparse_update_: expected indices of dimension %d below %lld, "
          "but got %lld (argument 'indices')\n",
          d,
          static_cast<long long>(size),
          static_cast<long long>(index));
      __trap();
    }
    row = row * size + index;
  }
  return row * rows.chunk + i % rows.chunk;
}

/// What one thread works on.
template <class C>
struct SM3SparseElement {
  int64_t i;        ///< of the values
  int64_t position; ///< in the parameter
  C gradient;       ///< scaled
};

// Calls `body(element)` for the thread's element, unless the step is skipped.
template <class C, class Body>
TORCH_SM3_DEVICE void sm3_for_sparse(
    const SM3Table<C>& table,
    const SM3SparseRows& rows,
    const Body& body) {
  const int64_t i =
      static_cast<int64_t>(blockIdx.x) * kSM3Threads + threadIdx.x;
  if (table.state->skips || i >= rows.count * rows.chunk) {
    return;
  }
  SM3SparseElement<C> element{};
  element.i = i;
  element.position = sm3_sparse_position(rows, table.numbers, i);
  sm3_gather(
      table.tensors[0].grad, table.numbers, SM3One{i}, &element.gradient);
  element.gradient = table.state->coefficients.scale * element.gradient;
  body(element);
}

// A set of one element is moved by its only thread, without scratch memory.
template <class C>
TORCH_SM3_DEVICE bool
sm3_is_own(const SM3DeviceTensor<C>& t, const SM3DeviceGroup<C>& group) {
  return group.numel == t.end;
}

// In sum mode the larger number is the new one anyway.
template <class C>
TORCH_SM3_DEVICE SM3Keeping sm3_sparse_keeping(
    const SM3DeviceGroup<C>& group,
    SM3Keeping keeping,
    bool sums) {
  const bool larger =
      keeping.accumulates ? !sums && !group.assigned : !group.assigned;
  return {keeping.accumulates, keeping.larger || larger};
}

/// Marks the touched sets: their new numbers begin at zero.
template <class C>
__global__ void __launch_bounds__(kSM3Threads)
    sm3_sparse_clear_kernel(SM3Table<C> table, SM3SparseRows rows) {
  sm3_for_sparse(table, rows, [&](const SM3SparseElement<C>& element) {
    const SM3DeviceTensor<C>& t = table.tensors[0];
    sm3_for_element(
        table,
        t,
        element.position,
        [&](const SM3DeviceGroup<C>& group, int64_t place) {
          if (!sm3_is_own(t, group)) {
            atomicExch(
                sm3_as_bits(table.next + group.next + place),
                typename SM3Bits<C>::type{0});
          }
        });
  });
}

/// The largest squares of the touched sets, for variant I.
template <class C>
__global__ void __launch_bounds__(kSM3Threads) sm3_sparse_maxima_kernel(
    SM3Table<C> table,
    SM3SparseRows rows,
    SM3Keeping keeping,
    bool sums) {
  sm3_for_sparse(table, rows, [&](const SM3SparseElement<C>& element) {
    const SM3DeviceTensor<C>& t = table.tensors[0];
    const C square = sm3_square(element.gradient);
    sm3_for_element(
        table,
        t,
        element.position,
        [&](const SM3DeviceGroup<C>& group, int64_t place) {
          if (!sm3_is_own(t, group)) {
            sm3_raise(table, group.next + place, square);
            return;
          }
          C& kept = group.kept[place];
          kept = sm3_kept(
              kept,
              square,
              sm3_sparse_keeping(group, keeping, sums),
              table.state->coefficients);
        });
  });
}

/// Moves the new numbers of the touched sets to the accumulators, each once:
/// whoever takes a number leaves in its place what no number is.
template <class C>
__global__ void __launch_bounds__(kSM3Threads) sm3_sparse_keep_kernel(
    SM3Table<C> table,
    SM3SparseRows rows,
    SM3Keeping keeping,
    bool sums) {
  using Bits = typename SM3Bits<C>::type;
  sm3_for_sparse(table, rows, [&](const SM3SparseElement<C>& element) {
    const SM3DeviceTensor<C>& t = table.tensors[0];
    sm3_for_element(
        table,
        t,
        element.position,
        [&](const SM3DeviceGroup<C>& group, int64_t place) {
          if (sm3_is_own(t, group)) {
            return;
          }
          const Bits number = atomicExch(
              sm3_as_bits(table.next + group.next + place), ~Bits{0});
          if (number != ~Bits{0}) {
            C& kept = group.kept[place];
            kept = sm3_kept(
                kept,
                sm3_from_bits<C>(number),
                sm3_sparse_keeping(group, keeping, sums),
                table.state->coefficients);
          }
        });
  });
}

/// Updates the touched elements.
///
/// \param final accumulators are final already
template <class C>
__global__ void __launch_bounds__(kSM3Threads) sm3_sparse_update_kernel(
    SM3Table<C> table,
    SM3SparseRows rows,
    SM3Keeping keeping,
    bool sums,
    bool final) {
  sm3_for_sparse(table, rows, [&](const SM3SparseElement<C>& element) {
    const SM3DeviceTensor<C>& t = table.tensors[0];
    SM3Coefficients<C> k = table.state->coefficients;
    k.given = k.given || final;
    const SM3One one{element.position};
    const C g = element.gradient;
    const C old = sm3_smallest_of_element(table, t, element.position);
    const C nu = sm3_bound(g, old, k);
    C w = 0;
    uint32_t random = 0;
    sm3_gather(t.param, table.numbers, one, &w);
    if (t.stochastic) {
      sm3_random_of_part(t, table.numbers, one, &random);
    }
    const C direction = sm3_first_decay(sm3_direction(g, nu, k), w, k);
    sm3_move_weights(t, table.numbers, one, k, &direction, &random, &w);
    if (k.given) {
      return;
    }
    sm3_for_element(
        table,
        t,
        element.position,
        [&](const SM3DeviceGroup<C>& group, int64_t place) {
          if (!sm3_is_own(t, group)) {
            sm3_raise(table, group.next + place, nu);
            return;
          }
          C& kept = group.kept[place];
          kept =
              sm3_kept(kept, nu, sm3_sparse_keeping(group, keeping, sums), k);
        });
  });
}

} // namespace torch_sm3
