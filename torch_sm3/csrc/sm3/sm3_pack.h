// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Packs the parameters of one call into the tables that sm3_device.h lays
/// down. It needs no GPU: the memory may be the host's.

#include <sm3_device.h>
#include <sm3_geometry.h>
#include <sm3_sparse.h>

#include <cstddef>
#include <vector>

namespace torch_sm3 {

/// The count of steps of one parameter, and what its random numbers hang on.
struct SM3Clock {
  int64_t* step;    ///< where kernels count it; null: it is counted already
  uint64_t ordinal; ///< of the parameter
  uint64_t key;     ///< of this step, if it is counted already
};

/// The parameters of one computing type.
template <class C>
class SM3Pack {
 public:
  explicit SM3Pack(const SM3Hyperparameters& hyperparameters)
      : h_(hyperparameters) {}

  /// A parameter with a dense gradient.
  void add(const SM3Geometry& geometry, const SM3Clock& clock);
  /// A gradient of which the largest squares are wanted: one array per group.
  void add_maxima(const SM3Geometry& geometry, const std::vector<C*>& out);
  /// The parameter of a sparse gradient, whose values the geometry has.
  void add_sparse(
      const SM3Geometry& geometry,
      const std::vector<SM3SparseGroup>& groups,
      const SM3Clock& clock);
  /// A parameter without elements, whose steps are counted nevertheless.
  void add_empty(int64_t* step);
  /// Puts numbers into the table. \return where they begin
  int32_t add_numbers(c10::IntArrayRef numbers);

  bool empty() const {
    return tensors_.empty();
  }
  /// Bytes that the host writes.
  int64_t upload_bytes() const {
    return layout().state;
  }
  /// Bytes of those and of the scratch memory behind them.
  int64_t bytes() const {
    return layout().end;
  }
  void write(char* host) const;
  /// \param memory `bytes()` bytes, which begin with those that `write` wrote
  SM3DenseLaunch<C> dense(char* memory, const SM3DeviceOptions& options) const;
  SM3Table<C> table(char* memory) const;

 private:
  struct Layout {
    int64_t groups, numbers, tiles, keep_tiles, state, next, end;
  };
  Layout layout() const;

  SM3DeviceTensor<C> describe(const SM3Geometry& g, const SM3Clock& clock);
  SM3DeviceStrided strided(const SM3Strided& tensor, int64_t length);
  void add_group(
      SM3DeviceTensor<C>& t,
      const SM3Group& group,
      C* kept,
      bool in_row,
      bool apart,
      bool assigned);
  void cut_elements(const SM3Geometry& g, SM3DeviceTensor<C>& t);
  void cut_rows(const SM3Geometry& g, size_t outer, SM3DeviceTensor<C>& t);
  void fill_tensors(const SM3Tensors& tensors, SM3DeviceTensor<C>& t);
  size_t list_of(const SM3DeviceTensor<C>& t) const;
  bool is_vector(const SM3DeviceTensor<C>& t) const;
  void add_tiles(const SM3DeviceTensor<C>& t, size_t list);
  void add_keep_tiles(const SM3DeviceTensor<C>& t);
  bool is_aligned(const SM3DeviceStrided& t) const;

  const SM3Hyperparameters h_;
  std::vector<SM3DeviceTensor<C>> tensors_;
  std::vector<SM3DeviceGroup<C>> groups_;
  std::vector<int64_t> numbers_;
  std::vector<SM3Tile> tiles_[kSM3Lists];
  std::vector<SM3Tile> keep_tiles_;
  int64_t scratch_ = 0;
};

/// Tensors in which kernels look for infinity and NaN.
class SM3NonfinitePack {
 public:
  void add(const at::Tensor& tensor);

  bool empty() const {
    return tiles_.empty();
  }
  int64_t bytes() const;
  void write(char* host) const;
  SM3NonfiniteLaunch launch(char* memory, float* found) const;

 private:
  std::vector<SM3DeviceStrided> tensors_;
  std::vector<int64_t> counts_;
  std::vector<int64_t> numbers_;
  std::vector<SM3Tile> tiles_;
};

} // namespace torch_sm3
