// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// A list of parameters as the CUDA kernels of SM3 take it: arrays of plain
/// structures in one buffer, and the tiles that blocks work on. A step is a few
/// launches, however many parameters there are.

#include <sm3_math.h>

#include <cstdint>

namespace torch_sm3 {

constexpr int kSM3Warp = 32;
constexpr int kSM3Warps = 8; ///< of a block
constexpr int kSM3Threads = kSM3Warp * kSM3Warps;
/// Elements of a row that one warp takes at a time. A block of int8 momentum is
/// one such span, so that a warp can find its scale.
constexpr int kSM3Span = 256;
constexpr int kSM3PerLane = kSM3Span / kSM3Warp;
/// Rows of a tile, at most: each lane of a warp keeps the number of one row.
constexpr int kSM3TileRows = 64;
constexpr int kSM3Pack = 4;            ///< elements loaded together
constexpr int64_t kSM3KeepTile = 4096; ///< numbers that one block moves

static_assert(kSM3TileRows <= kSM3Warp * kSM3Warps);
static_assert(kSM3Span == kSM3Block && kSM3Span == kSM3Threads);

/// How an element finds its numbers; see SM3Rows.
enum class SM3Form : int8_t { kDiagonal, kRows, kGeneral };

/// A tensor as a sequence in logical order; the sizes and strides of several
/// dimensions stand in the table of numbers.
struct SM3DeviceStrided {
  void* data;     ///< null: not there
  int64_t stride; ///< of the last dimension
  int32_t shape;  ///< first number: `dims` sizes, then `dims` strides
  int16_t dims;
  ScalarKind kind;
  bool by_row; ///< all elements of a row have that one stride
};

/// One accumulator.
template <class C>
struct SM3DeviceGroup {
  C* kept;         ///< the accumulator
  int64_t next;    ///< place of its new numbers in the scratch memory
  int64_t numel;   ///< its numbers
  int32_t strides; ///< first number: one stride per axis of the view
  bool in_row;     ///< it differs within a row
  bool assigned;   ///< by a sparse gradient; else only raised
};

/// One parameter.
template <class C>
struct SM3DeviceTensor {
  SM3DeviceStrided param;
  SM3DeviceStrided grad;
  SM3DeviceStrided momentum;
  SM3DeviceStrided compensation;
  SM3DeviceStrided index; ///< its strides give global numbers of elements
  float* scales;          ///< of int8 momentum, else null
  int64_t last;           ///< the last size: a row of `scales`
  int64_t index_start;
  uint64_t ordinal;
  uint64_t key;  ///< of the random numbers of this step
  int64_t* step; ///< on the device, or null: `key` is known
  int64_t begin; ///< the elements of the view that the tensors hold
  int64_t end;
  int64_t origin;  ///< element of the view where row 0 begins
  int64_t length;  ///< of a row
  int64_t unit;    ///< spans begin anew at its multiples in a row
  int64_t spans;   ///< of a row
  int64_t period;  ///< tiles begin anew at multiples of so many rows
  int64_t next;    ///< place of all new numbers in the scratch memory
  int64_t numbers; ///< of all groups; 0: they move where they are
  int32_t view;    ///< first number: the sizes of the axes
  int32_t groups;  ///< first group
  int32_t tile_rows;
  int16_t group_count;
  int16_t axes;
  int16_t outer; ///< axes before those of a row
  SM3Form form;
  bool stochastic;
  bool vector; ///< packs of elements are aligned and whole
};

/// What one block works on: a part of one parameter.
struct SM3Tile {
  int32_t tensor;
  uint32_t number; ///< rows before spans, or a part of the numbers
};

/// What the kernels of one step share; written by the first.
template <class C>
struct SM3DeviceState {
  SM3Coefficients<C> coefficients;
  bool skips;
};

/// Where everything is.
template <class C>
struct SM3Table {
  SM3DeviceTensor<C>* tensors;
  const SM3DeviceGroup<C>* groups;
  const int64_t* numbers;
  const SM3Tile* tiles;      ///< of elements, by kernel
  const SM3Tile* keep_tiles; ///< of accumulators
  SM3DeviceState<C>* state;
  C* next; ///< scratch memory: new numbers
};

/// A number that is known, or lies on the device.
struct SM3Number {
  const void* data; ///< null: known
  double value;
  ScalarKind kind;
};

/// What the first kernel makes a state of.
struct SM3DeviceOptions {
  SM3Hyperparameters h;
  SM3Number lr;
  SM3Number grad_scale;
  SM3Number found_inf;
  int64_t* skipped; ///< or null
  uint64_t seed;
};

/// Kernels that share the tiles: one for each type of the parameter with the
/// plain options, and one for everything.
constexpr int kSM3Plain = 3; // float32, float16, bfloat16
constexpr int kSM3Lists = kSM3Plain + 1;

/// A dense step, ready to run.
template <class C>
struct SM3DenseLaunch {
  SM3Table<C> table;
  SM3DeviceOptions options;
  int64_t tensors;
  int64_t scratch;          ///< numbers in it
  int64_t tiles[kSM3Lists]; ///< in each list, one after the other
  int64_t keep_tiles;
};

/// The rows that a sparse gradient names.
struct SM3SparseRows {
  const int64_t* indices;
  int64_t dim_stride;
  int64_t row_stride;
  int64_t count; ///< named rows
  int64_t chunk; ///< elements of each
  int32_t sizes; ///< first number: sizes of the sparse dimensions
  int32_t dims;
};

/// A sparse step of one parameter, ready to run.
template <class C>
struct SM3SparseLaunch {
  SM3Table<C> table;
  SM3DeviceOptions options;
  SM3SparseRows rows;
};

/// A search for numbers that are not finite, ready to run.
struct SM3NonfiniteLaunch {
  const SM3DeviceStrided* tensors;
  const int64_t* counts; ///< elements of each
  const int64_t* numbers;
  const SM3Tile* tiles;
  int64_t tile_count;
  float* found;
};

constexpr int64_t kSM3NonfiniteTile = 8192; ///< elements of one block

} // namespace torch_sm3
