// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The order of the launches of one step. `launch(blocks, kernel,
/// arguments...)` is a launch on the device or, for tests, on host threads.

#include <sm3_any_kernel.cuh>
#include <sm3_nonfinite_kernel.cuh>
#include <sm3_plain_kernel.cuh>
#include <sm3_sparse_kernel.cuh>

#include <type_traits>

namespace torch_sm3 {

template <class C, class Launch>
void sm3_begin(
    const SM3Table<C>& table,
    const SM3DeviceOptions& options,
    int64_t tensors,
    int64_t scratch,
    const Launch& launch) {
  constexpr int64_t kMost = 1024; // blocks: each thread may do more than one
  constexpr int64_t kPerBlock = int64_t{4} * kSM3Threads;
  const int64_t work = sm3_largest(tensors, scratch);
  const int64_t blocks = (work + kPerBlock - 1) / kPerBlock;
  launch(
      sm3_largest<int64_t>(1, sm3_least(blocks, kMost)),
      &sm3_begin_kernel<C>,
      table,
      options,
      tensors,
      scratch);
}

/// The lists of tiles in which a parameter's type is the kernel's; those of
/// float64 are empty.
template <bool kMomentum, class Launch>
void sm3_plain_lists(
    const SM3DenseLaunch<float>& l,
    bool final,
    const Launch& launch) {
  int64_t first = 0;
  const auto list = [&](int number, auto kernel) {
    if (l.tiles[number] > 0) {
      launch(l.tiles[number], kernel, l.table, first, final);
    }
    first += l.tiles[number];
  };
  list(0, &sm3_plain_kernel<float, kMomentum>);
  list(1, &sm3_plain_kernel<Half, kMomentum>);
  list(2, &sm3_plain_kernel<BFloat16, kMomentum>);
}

/// At most seven launches.
template <class C, class Launch>
void sm3_dense_step(const SM3DenseLaunch<C>& l, const Launch& launch) {
  const SM3Hyperparameters& h = l.options.h;
  const bool accumulates = h.variant == SM3Variant::kI;
  const int64_t any = l.tiles[kSM3Lists - 1];
  int64_t plain = 0;
  for (int i = 0; i < kSM3Plain; ++i) {
    plain += l.tiles[i];
  }
  sm3_begin(l.table, l.options, l.tensors, l.scratch, launch);
  const SM3Keeping keeping{accumulates, h.keep_larger};
  if (accumulates && l.keep_tiles > 0) {
    if (plain + any > 0) {
      launch(plain + any, &sm3_maxima_kernel<C>, l.table);
    }
    launch(l.keep_tiles, &sm3_keep_kernel<C>, l.table, keeping);
  }
  if constexpr (std::is_same_v<C, float>) {
    if (h.momentum > 0) {
      sm3_plain_lists<true>(l, accumulates, launch);
    } else {
      sm3_plain_lists<false>(l, accumulates, launch);
    }
  }
  if (any > 0) {
    const SM3Moving moving{accumulates, accumulates, h.keep_larger};
    launch(any, &sm3_any_kernel<C>, l.table, plain, moving);
  }
  if (h.variant == SM3Variant::kII && l.keep_tiles > 0) {
    launch(l.keep_tiles, &sm3_keep_kernel<C>, l.table, keeping);
  }
}

/// The largest squares of each set.
template <class C, class Launch>
void sm3_maxima_pass(const SM3DenseLaunch<C>& l, const Launch& launch) {
  sm3_begin(l.table, l.options, l.tensors, l.scratch, launch);
  const int64_t tiles = l.tiles[kSM3Lists - 1];
  if (tiles > 0) {
    launch(tiles, &sm3_maxima_kernel<C>, l.table);
  }
  launch(l.keep_tiles, &sm3_keep_kernel<C>, l.table, SM3Keeping{});
}

template <class C, class Launch>
void sm3_sparse_step(const SM3SparseLaunch<C>& l, const Launch& launch) {
  const SM3Hyperparameters& h = l.options.h;
  const bool sums = h.beta2 >= 1;
  const bool accumulates = h.variant == SM3Variant::kI;
  const SM3Keeping keeping{accumulates, h.keep_larger};
  const int64_t elements = l.rows.count * l.rows.chunk;
  const int64_t blocks = (elements + kSM3Threads - 1) / kSM3Threads;
  sm3_begin<C>(l.table, l.options, 1, 0, launch);
  if (blocks == 0) {
    return;
  }
  if (h.variant != SM3Variant::kGiven) {
    launch(blocks, &sm3_sparse_clear_kernel<C>, l.table, l.rows);
  }
  if (accumulates) {
    launch(
        blocks, &sm3_sparse_maxima_kernel<C>, l.table, l.rows, keeping, sums);
    launch(blocks, &sm3_sparse_keep_kernel<C>, l.table, l.rows, keeping, sums);
  }
  launch(
      blocks,
      &sm3_sparse_update_kernel<C>,
      l.table,
      l.rows,
      keeping,
      sums,
      accumulates);
  if (h.variant == SM3Variant::kII) {
    launch(blocks, &sm3_sparse_keep_kernel<C>, l.table, l.rows, keeping, sums);
  }
}

template <class Launch>
void sm3_nonfinite_pass(const SM3NonfiniteLaunch& l, const Launch& launch) {
  launch(l.tile_count, &sm3_nonfinite_kernel, l);
}

} // namespace torch_sm3
