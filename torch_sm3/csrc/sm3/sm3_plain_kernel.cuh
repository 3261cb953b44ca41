// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The CUDA kernel of SM3 for plain tensors: momentum, if any, has the type of
/// the parameter, rows have one stride, and results are rounded to nearest.

#include <sm3_tile_kernel.cuh>

#include <type_traits>

namespace torch_sm3 {

/// Elements that are loaded together.
template <class T>
struct alignas(kSM3Pack * sizeof(T) > 16 ? 16 : kSM3Pack * sizeof(T))
    SM3Packed {
  T values[kSM3Pack];
};

// Loads a lane's part of a row, unconverted, so that nothing waits for it here.
template <class T>
TORCH_SM3_DEVICE void
sm3_load(const T* row, int64_t stride, const SM3RowPart& part, T* out) {
  if (part.vector) {
    TORCH_SM3_UNROLL
    for (int i = 0; i < kSM3PerLane; i += kSM3Pack) {
      if (part.has(i)) {
        const auto* from =
            reinterpret_cast<const SM3Packed<T>*>(row + part.column_of(i));
        *reinterpret_cast<SM3Packed<T>*>(out + i) = *from;
      }
    }
  } else {
    TORCH_SM3_UNROLL
    for (int i = 0; i < kSM3PerLane; ++i) {
      if (part.has(i)) {
        out[i] = row[part.column_of(i) * stride];
      }
    }
  }
}

template <class T>
TORCH_SM3_DEVICE void
sm3_store(const T* in, int64_t stride, const SM3RowPart& part, T* row) {
  if (part.vector) {
    TORCH_SM3_UNROLL
    for (int i = 0; i < kSM3PerLane; i += kSM3Pack) {
      if (part.has(i)) {
        auto* to = reinterpret_cast<SM3Packed<T>*>(row + part.column_of(i));
        *to = *reinterpret_cast<const SM3Packed<T>*>(in + i);
      }
    }
  } else {
    TORCH_SM3_UNROLL
    for (int i = 0; i < kSM3PerLane; ++i) {
      if (part.has(i)) {
        row[part.column_of(i) * stride] = in[i];
      }
    }
  }
}

// Updates one row of a tile. `old` are the least accumulators of the lane's
// elements; they become nu, or zero for an element that is not there.
template <class C, class P, class G, bool kMomentum>
TORCH_SM3_DEVICE void sm3_plain_row(
    const SM3DeviceTensor<C>& t,
    const int64_t* numbers,
    const SM3Coefficients<C>& k,
    const SM3RowPart& part,
    C* old) {
  alignas(16) G g[kSM3PerLane] = {};
  alignas(16) P w[kSM3PerLane] = {};
  alignas(16) P m[kSM3PerLane] = {};
  const G* const grad =
      static_cast<const G*>(t.grad.data) + part.base(t.grad, numbers);
  P* const param = static_cast<P*>(t.param.data) + part.base(t.param, numbers);
  P* momentum = nullptr;
  sm3_load(grad, t.grad.stride, part, g);
  sm3_load<P>(param, t.param.stride, part, w);
  if constexpr (kMomentum) {
    momentum =
        static_cast<P*>(t.momentum.data) + part.base(t.momentum, numbers);
    sm3_load<P>(momentum, t.momentum.stride, part, m);
  }
  TORCH_SM3_UNROLL
  for (int i = 0; i < kSM3PerLane; ++i) {
    C gradient;
    C weight;
    sm3_widen(g[i], &gradient);
    sm3_widen(w[i], &weight);
    gradient = k.scale * gradient;
    const C nu = sm3_bound(gradient, old[i], k);
    C direction = sm3_first_decay(sm3_direction(gradient, nu, k), weight, k);
    if constexpr (kMomentum) {
      C before;
      sm3_widen(m[i], &before);
      direction = sm3_momentum(before, direction, k);
      round_to(direction, m + i);
    }
    round_to(sm3_weight(weight, direction, k), w + i);
    old[i] = part.has(i) ? nu : C(0);
  }
  sm3_store<P>(w, t.param.stride, part, param);
  if constexpr (kMomentum) {
    sm3_store<P>(m, t.momentum.stride, part, momentum);
  }
}

template <class C, class P, class G, bool kMomentum>
TORCH_SM3_DEVICE void sm3_plain_tile(
    const SM3Table<C>& table,
    const SM3DeviceTensor<C>& t,
    const SM3Coefficients<C>& k,
    const SM3TileSpan& span,
    SM3Columns<C>& columns) {
  const int lane = static_cast<int>(threadIdx.x % kSM3Warp);
  const int warp = static_cast<int>(threadIdx.x / kSM3Warp);
  const bool diagonal = t.form == SM3Form::kDiagonal;
  C* const kept = table.groups[t.groups].kept + t.begin;
  const C row_number = diagonal ? C(0) : sm3_open_tile(table, t, span, columns);
  SM3RowPart part{};
  part.lane = lane;
  part.vector = t.vector;
  C top[kSM3PerLane] = {};
  C largest = 0;
  for (int n = 0, r = warp; r < span.rows; ++n, r += kSM3Warps) {
    part = sm3_row_part(t, span, span.first_row + r, lane);
    alignas(16) C numbers[kSM3PerLane] = {};
    if (diagonal) {
      sm3_load<C>(kept + part.start + part.column, 1, part, numbers);
    } else {
      const C of_row = __shfl_sync(0xffffffffu, row_number, n);
      TORCH_SM3_UNROLL
      for (int i = 0; i < kSM3PerLane; ++i) {
        numbers[i] = sm3_least(columns.smallest[part.column_of(i)], of_row);
      }
    }
    sm3_plain_row<C, P, G, kMomentum>(t, table.numbers, k, part, numbers);
    if (diagonal) {
      sm3_store<C>(numbers, 1, part, kept + part.start + part.column);
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
  if (!diagonal && !k.given) {
    sm3_close_tile(table, t, span, part, top, largest, columns);
  }
}

/// One block updates one tile of one parameter of type P, whose gradient has
/// that type or float32 or, for a float32 parameter, any.
///
/// \param first the first tile
/// \param final accumulators are final already, except those of full size
template <class P, bool kMomentum>
__global__ void __launch_bounds__(kSM3Threads, kMomentum ? 2 : 3)
    sm3_plain_kernel(SM3Table<float> table, int64_t first, bool final) {
  __shared__ SM3Columns<float> columns;
  if (table.state->skips) {
    return;
  }
  const SM3Tile tile = table.tiles[first + blockIdx.x];
  const SM3DeviceTensor<float>& t = table.tensors[tile.tensor];
  SM3Coefficients<float> k = table.state->coefficients;
  k.given = k.given || (final && t.form != SM3Form::kDiagonal);
  const SM3TileSpan span = sm3_tile_span(t, tile.number);
  sm3_with_kind<float>(t.grad.kind, [&](auto type) {
    using G = decltype(type);
    if constexpr (sizeof(P) == 4 || sizeof(G) == 4 || std::is_same_v<P, G>) {
      sm3_plain_tile<float, P, G, kMomentum>(table, t, k, span, columns);
    }
  });
}

} // namespace torch_sm3
