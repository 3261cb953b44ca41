// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What the CUDA kernels of SM3 share: addresses, tiles, the numbers of rows
/// and columns; the first and the last kernel of a step. Compiled by nvcc and,
/// for tests, by the host compiler after tests/cpp/cuda_on_host.h.

#include <sm3_device.h>

#include <cstdint>

#define TORCH_SM3_DEVICE static __device__ __forceinline__
// RARE: what would be compiled into many places and is seldom run.
#if defined(__CUDACC__)
#define TORCH_SM3_UNROLL _Pragma("unroll")
#define TORCH_SM3_RARE static __device__ __noinline__
#else
#define TORCH_SM3_UNROLL
#define TORCH_SM3_RARE TORCH_SM3_DEVICE
#endif

namespace torch_sm3 {

// Non-negative floats are ordered as their bits are, and integers have an
// atomic maximum.
template <class C>
struct SM3Bits;
template <>
struct SM3Bits<float> {
  using type = unsigned int;
};
template <>
struct SM3Bits<double> {
  using type = unsigned long long;
};

template <class C>
TORCH_SM3_INLINE typename SM3Bits<C>::type sm3_bits(C x) {
  typename SM3Bits<C>::type bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

template <class C>
TORCH_SM3_INLINE C sm3_from_bits(typename SM3Bits<C>::type bits) {
  C x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

template <class C>
TORCH_SM3_DEVICE typename SM3Bits<C>::type* sm3_as_bits(C* numbers) {
  return reinterpret_cast<typename SM3Bits<C>::type*>(numbers);
}

template <class T>
TORCH_SM3_INLINE T sm3_least(T a, T b) {
  return b < a ? b : a;
}

template <class T>
TORCH_SM3_INLINE T sm3_largest(T a, T b) {
  return a < b ? b : a;
}

TORCH_SM3_INLINE void sm3_widen(double x, double* out) {
  *out = x;
}
template <class T>
TORCH_SM3_INLINE void sm3_widen(T x, float* out) {
  *out = to_float(x);
}
template <class T>
TORCH_SM3_INLINE void sm3_widen(T x, double* out) {
  *out = to_double(x);
}

// Calls `body(T{})` with the floating type that `kind` names.
template <class C, class Body>
TORCH_SM3_DEVICE void sm3_with_kind(ScalarKind kind, const Body& body) {
  switch (kind) {
    case ScalarKind::kFloat16:
      body(Half{});
      break;
    case ScalarKind::kBFloat16:
      body(BFloat16{});
      break;
    case ScalarKind::kFloat64:
      if constexpr (sizeof(C) == sizeof(double)) {
        body(double{});
      }
      break;
    case ScalarKind::kFloat32:
      body(float{});
      break;
  }
}

// --- addresses --------------------------------------------------------------

// Where number `position` is along the axes [from, to), the last running
// fastest.
TORCH_SM3_RARE int64_t sm3_place_of_axes(
    const int64_t* sizes,
    const int64_t* strides,
    int from,
    int to,
    int64_t position) {
  int64_t place = 0;
  for (int axis = to - 1; axis > from; --axis) {
    place += position % sizes[axis] * strides[axis];
    position /= sizes[axis];
  }
  return place + position * strides[from];
}

TORCH_SM3_DEVICE int64_t sm3_place(
    const int64_t* sizes,
    const int64_t* strides,
    int from,
    int to,
    int64_t position) {
  return to - from == 1 ? position * strides[from]
                        : sm3_place_of_axes(sizes, strides, from, to, position);
}

// Where an element of a tensor is. A tensor of one dimension may be asked for
// elements before its first.
TORCH_SM3_DEVICE int64_t
sm3_offset(const SM3DeviceStrided& t, const int64_t* numbers, int64_t element) {
  const int64_t* const sizes = numbers + t.shape;
  return t.dims <= 1
             ? element * t.stride
             : sm3_place_of_axes(sizes, sizes + t.dims, 0, t.dims, element);
}

/// The part of a parameter that a block works on.
struct SM3TileSpan {
  int64_t first_row;
  int rows;
  int64_t column; ///< the first
  int columns;
};

template <class C>
TORCH_SM3_DEVICE SM3TileSpan
sm3_tile_span(const SM3DeviceTensor<C>& t, uint32_t number) {
  const int64_t row_tile = number / t.spans;
  const int64_t span = number % t.spans;
  const int64_t per_period = (t.period + t.tile_rows - 1) / t.tile_rows;
  const int64_t in_period = row_tile % per_period * t.tile_rows;
  const int64_t per_unit = (t.unit + kSM3Span - 1) / kSM3Span;
  const int64_t in_unit = span % per_unit * kSM3Span;
  SM3TileSpan s;
  s.first_row = row_tile / per_period * t.period + in_period;
  s.rows =
      static_cast<int>(sm3_least<int64_t>(t.tile_rows, t.period - in_period));
  s.column = span / per_unit * t.unit + in_unit;
  const int64_t left = sm3_least(t.unit - in_unit, t.length - s.column);
  s.columns = static_cast<int>(sm3_least<int64_t>(kSM3Span, left));
  return s;
}

/// A lane's elements of one row of a tile.
struct SM3RowPart {
  static constexpr int kCount = kSM3PerLane;
  int64_t start;  ///< element of the tensors where the row begins
  int64_t column; ///< the span's first
  int low;        ///< columns of the span that are there: [low, high)
  int high;
  int lane;
  bool vector; ///< a lane's columns come in packs

  __device__ __forceinline__ int column_of(int i) const {
    return vector ? i / kSM3Pack * (kSM3Warp * kSM3Pack) + lane * kSM3Pack +
                        i % kSM3Pack
                  : i * kSM3Warp + lane;
  }
  __device__ __forceinline__ bool has(int i) const {
    return column_of(i) >= low && column_of(i) < high;
  }
  __device__ __forceinline__ int64_t element(int i) const {
    return start + column + column_of(i);
  }
  // Where the span begins in a tensor whose rows have one stride.
  __device__ __forceinline__ int64_t
  base(const SM3DeviceStrided& t, const int64_t* numbers) const {
    return sm3_offset(t, numbers, start) + column * t.stride;
  }
};

template <class C>
TORCH_SM3_DEVICE SM3RowPart sm3_row_part(
    const SM3DeviceTensor<C>& t,
    const SM3TileSpan& span,
    int64_t row,
    int lane) {
  const int64_t start = t.origin + row * t.length;
  const int64_t first = start + span.column;
  SM3RowPart part;
  part.start = start - t.begin;
  part.column = span.column;
  part.low = static_cast<int>(
      sm3_least<int64_t>(kSM3Span, sm3_largest<int64_t>(0, t.begin - first)));
  part.high = static_cast<int>(
      sm3_largest<int64_t>(0, sm3_least<int64_t>(span.columns, t.end - first)));
  part.lane = lane;
  part.vector = t.vector;
  return part;
}

// --- numbers of rows and columns --------------------------------------------

/// Numbers of the columns of a tile, one for each thread of the block.
template <class C>
struct SM3Columns {
  C smallest[kSM3Span];
  typename SM3Bits<C>::type largest[kSM3Span];
};

// Calls `body(group, place)` for the accumulators that all of a row shares.
template <class C, class Body>
TORCH_SM3_DEVICE void sm3_for_row(
    const SM3Table<C>& table,
    const SM3DeviceTensor<C>& t,
    int64_t row,
    const Body& body) {
  for (int i = 0; i < t.group_count; ++i) {
    const SM3DeviceGroup<C>& group = table.groups[t.groups + i];
    if (!group.in_row) {
      const int64_t* const view = table.numbers + t.view;
      const int64_t* const strides = table.numbers + group.strides;
      body(group, sm3_place(view, strides, 0, t.outer, row));
    }
  }
}

// Calls `body(group, place)` for the accumulators that differ within a row.
template <class C, class Body>
TORCH_SM3_DEVICE void sm3_for_column(
    const SM3Table<C>& table,
    const SM3DeviceTensor<C>& t,
    int64_t row,
    int64_t column,
    const Body& body) {
  for (int i = 0; i < t.group_count; ++i) {
    const SM3DeviceGroup<C>& group = table.groups[t.groups + i];
    if (group.in_row) {
      const int64_t* const view = table.numbers + t.view;
      const int64_t* const strides = table.numbers + group.strides;
      body(
          group,
          sm3_place(view, strides, 0, t.outer, row) +
              sm3_place(view, strides, t.outer, t.axes, column));
    }
  }
}

// Calls `body(group, place)` for all accumulators of an element of the view.
template <class C, class Body>
TORCH_SM3_DEVICE void sm3_for_element(
    const SM3Table<C>& table,
    const SM3DeviceTensor<C>& t,
    int64_t element,
    const Body& body) {
  for (int i = 0; i < t.group_count; ++i) {
    const SM3DeviceGroup<C>& group = table.groups[t.groups + i];
    const int64_t* const view = table.numbers + t.view;
    const int64_t* const strides = table.numbers + group.strides;
    body(group, sm3_place(view, strides, 0, t.axes, element));
  }
}

template <class C>
TORCH_SM3_DEVICE C sm3_smallest_of_element(
    const SM3Table<C>& table,
    const SM3DeviceTensor<C>& t,
    int64_t element) {
  C smallest = SM3Limits<C>::kMax;
  sm3_for_element(
      table, t, element, [&](const SM3DeviceGroup<C>& group, int64_t place) {
        smallest = sm3_least(smallest, group.kept[place]);
      });
  return smallest;
}

template <class C>
TORCH_SM3_DEVICE void
sm3_raise(const SM3Table<C>& table, int64_t place, C number) {
  atomicMax(sm3_as_bits(table.next + place), sm3_bits(number));
}

template <class C>
TORCH_SM3_DEVICE void sm3_raise_element(
    const SM3Table<C>& table,
    const SM3DeviceTensor<C>& t,
    int64_t element,
    C number) {
  sm3_for_element(
      table, t, element, [&](const SM3DeviceGroup<C>& group, int64_t place) {
        sm3_raise(table, group.next + place, number);
      });
}

/// Old numbers of a tile on its way in: each thread of the block looks up one
/// column, and each lane one of the warp's rows, whose number it returns.
///
/// The block meets in here.
template <class C>
TORCH_SM3_DEVICE C sm3_open_tile(
    const SM3Table<C>& table,
    const SM3DeviceTensor<C>& t,
    const SM3TileSpan& span,
    SM3Columns<C>& columns) {
  const int thread = static_cast<int>(threadIdx.x);
  C column = SM3Limits<C>::kMax;
  if (thread < span.columns) {
    sm3_for_column(
        table,
        t,
        span.first_row,
        span.column + thread,
        [&](const SM3DeviceGroup<C>& group, int64_t place) {
          column = sm3_least(column, group.kept[place]);
        });
  }
  columns.smallest[thread] = column;
  columns.largest[thread] = 0;
  const int row = thread / kSM3Warp + thread % kSM3Warp * kSM3Warps;
  C smallest = SM3Limits<C>::kMax;
  if (row < span.rows) {
    sm3_for_row(
        table,
        t,
        span.first_row + row,
        [&](const SM3DeviceGroup<C>& group, int64_t place) {
          smallest = sm3_least(smallest, group.kept[place]);
        });
  }
  __syncthreads();
  return smallest;
}

/// New numbers of a tile on its way out.
///
/// \param top     largest of each of the lane's columns, in the warp's rows
/// \param largest of the row whose number the lane looked up
template <class C>
TORCH_SM3_DEVICE void sm3_close_tile(
    const SM3Table<C>& table,
    const SM3DeviceTensor<C>& t,
    const SM3TileSpan& span,
    const SM3RowPart& part,
    const C* top,
    C largest,
    SM3Columns<C>& columns) {
  TORCH_SM3_UNROLL
  for (int i = 0; i < kSM3PerLane; ++i) {
    atomicMax(&columns.largest[part.column_of(i)], sm3_bits(top[i]));
  }
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / kSM3Warp + thread % kSM3Warp * kSM3Warps;
  if (row < span.rows) {
    sm3_for_row(
        table,
        t,
        span.first_row + row,
        [&](const SM3DeviceGroup<C>& group, int64_t place) {
          sm3_raise(table, group.next + place, largest);
        });
  }
  __syncthreads();
  if (thread < span.columns) {
    sm3_for_column(
        table,
        t,
        span.first_row,
        span.column + thread,
        [&](const SM3DeviceGroup<C>& group, int64_t place) {
          atomicMax(
              sm3_as_bits(table.next + group.next + place),
              columns.largest[thread]);
        });
  }
}

// The largest of a number in each lane of the warp.
template <class C>
TORCH_SM3_DEVICE C sm3_largest_of_warp(C number) {
  for (int distance = kSM3Warp / 2; distance > 0; distance /= 2) {
    const C other = __shfl_xor_sync(0xffffffffu, number, distance);
    number = sm3_largest(number, other);
  }
  return number;
}

// --- first and last kernel --------------------------------------------------

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
