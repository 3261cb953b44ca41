// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Accumulators as CUDA kernels of SM3 read and raise them: by element, or by
/// the rows and columns of a tile.

#include <sm3_kernel.cuh>

namespace torch_sm3 {

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

} // namespace torch_sm3
