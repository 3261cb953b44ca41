// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The first and the last CUDA kernel of a step of SM3.

#include <sm3_kernel.cuh>

namespace torch_sm3 {

TORCH_SM3_DEVICE double sm3_read(const SM3Number& number) {
  double value = number.value;
  if (number.data != nullptr) {
    sm3_with_kind<double>(number.kind, [&](auto type) {
      sm3_widen(*static_cast<const decltype(type)*>(number.data), &value);
    });
  }
  return value;
}

/// The first kernel of a step: rounds the hyper-parameters, counts the steps
/// and clears the scratch memory; or, where the step is skipped, only says so.
template <class C>
__global__ void __launch_bounds__(kSM3Threads) sm3_begin_kernel(
    SM3Table<C> table,
    SM3DeviceOptions options,
    int64_t tensors,
    int64_t scratch) {
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * kSM3Threads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kSM3Threads;
  const bool skips = sm3_read(options.found_inf) != 0.0;
  if (first == 0) {
    table.state->coefficients = sm3_coefficients<C>(
        options.h, sm3_read(options.lr), sm3_read(options.grad_scale));
    table.state->skips = skips;
    if (skips && options.skipped != nullptr) {
      *options.skipped += 1;
    }
  }
  if (skips) {
    return;
  }
  for (int64_t i = first; i < scratch; i += stride) {
    table.next[i] = C(0);
  }
  for (int64_t i = first; i < tensors; i += stride) {
    SM3DeviceTensor<C>& t = table.tensors[i];
    if (t.step != nullptr) {
      const int64_t step = *t.step + 1;
      *t.step = step;
      t.key =
          sm3_random_key(options.seed, static_cast<uint64_t>(step), t.ordinal);
    }
  }
}

/// How new numbers become accumulators.
struct SM3Keeping {
  bool accumulates; ///< they are squares, the first phase of variant I
  bool larger;      ///< accumulators never decrease
};

template <class C>
TORCH_SM3_DEVICE C
sm3_kept(C before, C number, SM3Keeping keeping, const SM3Coefficients<C>& k) {
  const C next =
      keeping.accumulates ? sm3_accumulate(before, number, k) : number;
  return keeping.larger ? sm3_largest(before, next) : next;
}

/// Moves new numbers from the scratch memory to the accumulators.
template <class C>
__global__ void __launch_bounds__(kSM3Threads)
    sm3_keep_kernel(SM3Table<C> table, SM3Keeping keeping) {
  if (table.state->skips) {
    return;
  }
  const SM3Tile tile = table.keep_tiles[blockIdx.x];
  const SM3DeviceTensor<C>& t = table.tensors[tile.tensor];
  const SM3Coefficients<C> k = table.state->coefficients;
  const int64_t first = tile.number * kSM3KeepTile;
  const int64_t end = sm3_least(t.numbers, first + kSM3KeepTile);
  for (int64_t i = first + threadIdx.x; i < end; i += kSM3Threads) {
    int group = t.groups;
    int64_t place = i;
    while (place >= table.groups[group].numel) {
      place -= table.groups[group].numel;
      ++group;
    }
    C* const kept = table.groups[group].kept + place;
    *kept = sm3_kept(*kept, table.next[t.next + i], keeping, k);
  }
}

} // namespace torch_sm3
