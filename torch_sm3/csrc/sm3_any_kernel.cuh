// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The CUDA kernels of SM3 for a dense gradient with any options and any cover,
/// and for the largest squares of variant I.

#include <sm3_part_kernel.cuh>

namespace torch_sm3 {

/// What accumulators of full size do, which no other kernel moves.
struct SM3Moving {
  bool final;       ///< all others are final already
  bool accumulates; ///< variant I: they move before the update
  bool larger;      ///< they never decrease
};

/// Largest sizes of the blocks of int8 momentum in each warp's row.
struct SM3Sizes {
  unsigned largest[kSM3Warps][kSM3Span];
};

// --- momentum ---------------------------------------------------------------

// The scale of a span's first element. A span lies in one block or, where the
// last size is smaller than that, is made of whole ones.
template <class C>
TORCH_SM3_DEVICE int64_t
sm3_first_scale(const SM3DeviceTensor<C>& t, const SM3RowPart& part) {
  const int64_t element = part.start + part.column;
  const int64_t blocks = (t.last + kSM3Block - 1) / kSM3Block;
  return element / t.last * blocks + element % t.last / kSM3Block;
}

template <class C>
TORCH_SM3_DEVICE int sm3_block_of(const SM3DeviceTensor<C>& t, int column) {
  return t.last < kSM3Block ? column / static_cast<int>(t.last) : 0;
}

TORCH_SM3_DEVICE void sm3_load_blocks(
    const SM3DeviceTensor<float>& t,
    const int64_t* numbers,
    const SM3RowPart& part,
    float* m) {
  const auto* const in = static_cast<const int8_t*>(t.momentum.data);
  const float* const scales = t.scales + sm3_first_scale(t, part);
  int64_t places[kSM3PerLane] = {};
  sm3_find_places(t.momentum, numbers, part, places);
  sm3_for_part(part, [&](int i) {
    m[i] = static_cast<float>(in[places[i]]) *
           scales[sm3_block_of(t, part.column_of(i))];
  });
}

// What counts for the scale: |m| unless it is not finite.
TORCH_SM3_DEVICE float sm3_size(float m) {
  return is_finite(m) ? (m < 0 ? -m : m) : 0.0f;
}

TORCH_SM3_DEVICE void sm3_find_sizes(
    const SM3DeviceTensor<float>& t,
    const SM3RowPart& part,
    const float* m,
    unsigned* sizes) {
  if (t.last >= kSM3Block) {
    float largest = 0;
    TORCH_SM3_UNROLL
    for (int i = 0; i < kSM3PerLane; ++i) {
      largest = sm3_largest(largest, part.has(i) ? sm3_size(m[i]) : 0.0f);
    }
    largest = sm3_largest_of_warp(largest);
    if (part.lane == 0) {
      sizes[0] = sm3_bits(largest);
    }
    __syncwarp();
    return;
  }
  for (int i = part.lane; i < kSM3Span; i += kSM3Warp) {
    sizes[i] = 0;
  }
  __syncwarp();
  TORCH_SM3_UNROLL
  for (int i = 0; i < kSM3PerLane; ++i) {
    if (part.has(i)) {
      unsigned* const size = sizes + sm3_block_of(t, part.column_of(i));
      atomicMax(size, sm3_bits(sm3_size(m[i])));
    }
  }
  __syncwarp();
}

TORCH_SM3_DEVICE void sm3_store_blocks(
    const SM3DeviceTensor<float>& t,
    const int64_t* numbers,
    const SM3RowPart& part,
    const float* m,
    const uint32_t* random,
    unsigned* sizes) {
  sm3_find_sizes(t, part, m, sizes);
  auto* const out = static_cast<int8_t*>(t.momentum.data);
  float* const scales = t.scales + sm3_first_scale(t, part);
  const int last = static_cast<int>(sm3_least<int64_t>(t.last, kSM3Block));
  int64_t places[kSM3PerLane] = {};
  sm3_find_places(t.momentum, numbers, part, places);
  sm3_for_part(part, [&](int i) {
    const int column = part.column_of(i);
    const int block = sm3_block_of(t, column);
    const float scale = sm3_from_bits<float>(sizes[block]) / 127.0f;
    const float chance = t.stochastic ? sm3_momentum_random(random[i]) : -1.0f;
    out[places[i]] = sm3_quantize(m[i], scale, chance);
    if (column % last == 0) {
      scales[block] = scale;
    }
  });
  // The warp's next row clears what is read here.
  __syncwarp();
}

template <class C>
TORCH_SM3_DEVICE void sm3_load_momentum(
    const SM3DeviceTensor<C>& t,
    const int64_t* numbers,
    const SM3RowPart& part,
    C* m) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (t.scales != nullptr) {
      sm3_load_blocks(t, numbers, part, m);
      return;
    }
  }
  sm3_gather(t.momentum, numbers, part, m);
}

template <class C>
TORCH_SM3_DEVICE void sm3_store_momentum(
    const SM3DeviceTensor<C>& t,
    const int64_t* numbers,
    const SM3RowPart& part,
    const C* m,
    const uint32_t* random,
    unsigned* sizes) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (t.scales != nullptr) {
      sm3_store_blocks(t, numbers, part, m, random, sizes);
      return;
    }
  }
  sm3_scatter(m, t.momentum, numbers, part);
}

// --- rows -------------------------------------------------------------------

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
  for (int n = 0; warp + n * kSM3Warps < span.rows; ++n) {
    part = sm3_row_part(t, span, span.first_row + warp + n * kSM3Warps, lane);
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
