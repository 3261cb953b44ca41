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

} // namespace torch_sm3
