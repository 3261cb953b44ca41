// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The CUDA kernels of SM3 for a dense gradient with any options and any cover,
/// and for the largest squares of variant I.

#include <sm3_momentum_kernel.cuh>
#include <sm3_step_kernel.cuh>
#include <sm3_tile_kernel.cuh>

namespace torch_sm3 {

/// What accumulators of full size do, which no other kernel moves.
struct SM3Moving {
  bool final;       ///< all others are final already
  bool accumulates; ///< variant I: they move before the update
  bool larger;      ///< they never decrease
};

// Updates one row of a tile, whose scaled gradients are `g`. `old` are the
// least accumulators of the lane's elements; they become nu, or zero for an
// element that is not there.
template <class C>
TORCH_SM3_DEVICE void sm3_any_row(
    const SM3DeviceTensor<C>& t,
    const int64_t* numbers,
    const SM3Coefficients<C>& k,
    const SM3RowPart& part,
    const C* g,
    unsigned* sizes,
    C* old) {
  C w[kSM3PerLane] = {};
  C direction[kSM3PerLane];
  uint32_t random[kSM3PerLane] = {};
  sm3_gather(t.param, numbers, part, w);
  if (t.stochastic) {
    sm3_random_of_part(t, numbers, part, random);
  }
  TORCH_SM3_UNROLL
  for (int i = 0; i < kSM3PerLane; ++i) {
    const C nu = sm3_bound(g[i], old[i], k);
    direction[i] = sm3_first_decay(sm3_direction(g[i], nu, k), w[i], k);
    old[i] = part.has(i) ? nu : C(0);
  }
  if (t.momentum.data != nullptr) {
    C m[kSM3PerLane] = {};
    sm3_load_momentum(t, numbers, part, m);
    TORCH_SM3_UNROLL
    for (int i = 0; i < kSM3PerLane; ++i) {
      direction[i] = sm3_momentum(m[i], direction[i], k);
    }
    sm3_store_momentum(t, numbers, part, direction, random, sizes);
  }
  sm3_move_weights(t, numbers, part, k, direction, random, w);
}

template <class C>
TORCH_SM3_DEVICE void sm3_scaled_gradients(
    const SM3DeviceTensor<C>& t,
    const int64_t* numbers,
    const SM3Coefficients<C>& k,
    const SM3RowPart& part,
    C* g) {
  sm3_gather(t.grad, numbers, part, g);
  TORCH_SM3_UNROLL
  for (int i = 0; i < kSM3PerLane; ++i) {
    g[i] = k.scale * g[i];
  }
}

// The least accumulators of a lane's elements where they are not those of rows
// and columns.
template <class C>
TORCH_SM3_DEVICE void sm3_find_smallest(
    const SM3Table<C>& table,
    const SM3DeviceTensor<C>& t,
    const SM3RowPart& part,
    C* numbers) {
  const C* const kept = table.groups[t.groups].kept;
  const bool diagonal = t.form == SM3Form::kDiagonal;
  sm3_for_part(part, [&](int i) {
    const int64_t element = t.begin + part.element(i);
    numbers[i] =
        diagonal ? kept[element] : sm3_smallest_of_element(table, t, element);
  });
}

// New numbers of a row of an accumulator of full size, which moves where it is.
template <class C>
TORCH_SM3_DEVICE void sm3_keep_diagonal(
    const SM3Table<C>& table,
    const SM3DeviceTensor<C>& t,
    const SM3RowPart& part,
    bool larger,
    const C* numbers) {
  C* const kept = table.groups[t.groups].kept;
  sm3_for_part(part, [&](int i) {
    C& to = kept[t.begin + part.element(i)];
    to = larger ? sm3_largest(to, numbers[i]) : numbers[i];
  });
}

template <class C>
TORCH_SM3_DEVICE void sm3_raise_elements(
    const SM3Table<C>& table,
    const SM3DeviceTensor<C>& t,
    const SM3RowPart& part,
    const C* numbers) {
  sm3_for_part(part, [&](int i) {
    sm3_raise_element(table, t, t.begin + part.element(i), numbers[i]);
  });
}

// The rows of a tile that are the warp's. `nu(part, numbers)` makes bounds of
// the least accumulators of a lane's elements, `keep(part, numbers)` keeps them
// where they are not the numbers of rows and columns.
template <class C, class Nu, class Keep>
TORCH_SM3_DEVICE void sm3_walk_tile(
    const SM3Table<C>& table,
    const SM3DeviceTensor<C>& t,
    const SM3TileSpan& span,
    bool raises,
    SM3Columns<C>& columns,
    const Nu& nu,
    const Keep& keep) {
  const int lane = static_cast<int>(threadIdx.x % kSM3Warp);
  const int warp = static_cast<int>(threadIdx.x / kSM3Warp);
  const bool by_rows = t.form == SM3Form::kRows;
  const C row_number = by_rows ? sm3_open_tile(table, t, span, columns) : C(0);
  SM3RowPart part{};
  part.lane = lane;
  C top[kSM3PerLane] = {};
  C largest = 0;
  for (int n = 0, r = warp; r < span.rows; ++n, r += kSM3Warps) {
    part = sm3_row_part(t, span, span.first_row + r, lane);
    // Neighbours go to neighbouring lanes: elements are loaded one by one.
    part.vector = false;
    C numbers[kSM3PerLane] = {};
    if (by_rows) {
      const C of_row = __shfl_sync(0xffffffffu, row_number, n);
      TORCH_SM3_UNROLL
      for (int i = 0; i < kSM3PerLane; ++i) {
        numbers[i] = sm3_least(columns.smallest[part.column_of(i)], of_row);
      }
    }
    nu(part, numbers);
    if (!by_rows) {
      keep(part, numbers);
      continue;
    }
    C row_largest = 0;
    TORCH_SM3_UNROLL
    for (int i = 0; i < kSM3PerLane; ++i) {
      top[i] = sm3_largest(top[i], numbers[i]);
      row_largest = sm3_largest(row_largest, numbers[i]);
    }
    row_largest = sm3_largest_of_warp(row_largest);
    largest = lane == n ? row_largest : largest;
  }
  if (by_rows && raises) {
    sm3_close_tile(table, t, span, part, top, largest, columns);
  }
}

/// One block updates one tile of one parameter.
///
/// \param first the first tile
template <class C>
__global__ void __launch_bounds__(kSM3Threads)
    sm3_any_kernel(SM3Table<C> table, int64_t first, SM3Moving moving) {
  __shared__ SM3Columns<C> columns;
  __shared__ SM3Sizes sizes;
  if (table.state->skips) {
    return;
  }
  const SM3Tile tile = table.tiles[first + blockIdx.x];
  const SM3DeviceTensor<C>& t = table.tensors[tile.tensor];
  const SM3Coefficients<C> plain = table.state->coefficients;
  const bool diagonal = t.form == SM3Form::kDiagonal;
  const bool accumulates = diagonal && moving.accumulates;
  SM3Coefficients<C> k = plain;
  k.given = k.given || moving.final;
  unsigned* const own = sizes.largest[threadIdx.x / kSM3Warp];
  const auto nu = [&](const SM3RowPart& part, C* numbers) {
    C g[kSM3PerLane] = {};
    sm3_scaled_gradients(t, table.numbers, k, part, g);
    if (t.form != SM3Form::kRows) {
      sm3_find_smallest(table, t, part, numbers);
    }
    TORCH_SM3_UNROLL
    for (int i = 0; i < kSM3PerLane && accumulates; ++i) {
      const SM3Keeping keeping{true, moving.larger};
      numbers[i] = sm3_kept(numbers[i], sm3_square(g[i]), keeping, plain);
    }
    sm3_any_row(t, table.numbers, k, part, g, own, numbers);
  };
  const auto keep = [&](const SM3RowPart& part, const C* numbers) {
    if (diagonal) {
      sm3_keep_diagonal(table, t, part, moving.larger, numbers);
    } else if (!k.given) {
      sm3_raise_elements(table, t, part, numbers);
    }
  };
  const SM3TileSpan span = sm3_tile_span(t, tile.number);
  sm3_walk_tile(table, t, span, !k.given, columns, nu, keep);
}

/// One block finds the largest squares of one tile; a parameter whose numbers
/// move where they are has none.
template <class C>
__global__ void __launch_bounds__(kSM3Threads)
    sm3_maxima_kernel(SM3Table<C> table) {
  __shared__ SM3Columns<C> columns;
  if (table.state->skips) {
    return;
  }
  const SM3Tile tile = table.tiles[blockIdx.x];
  const SM3DeviceTensor<C>& t = table.tensors[tile.tensor];
  if (t.numbers == 0) {
    return;
  }
  const SM3Coefficients<C> k = table.state->coefficients;
  const auto squares = [&](const SM3RowPart& part, C* numbers) {
    C g[kSM3PerLane] = {};
    sm3_scaled_gradients(t, table.numbers, k, part, g);
    TORCH_SM3_UNROLL
    for (int i = 0; i < kSM3PerLane; ++i) {
      numbers[i] = part.has(i) ? sm3_square(g[i]) : C(0);
    }
  };
  const auto keep = [&](const SM3RowPart& part, const C* numbers) {
    sm3_raise_elements(table, t, part, numbers);
  };
  const SM3TileSpan span = sm3_tile_span(t, tile.number);
  sm3_walk_tile(table, t, span, true, columns, squares, keep);
}

} // namespace torch_sm3
