// SPDX-License-Identifier: Apache-2.0
#include <sm3_cpu.h>

#include <ATen/Parallel.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <mutex>

namespace torch_sm3 {
namespace {

// Rows and columns of a gradient that are turned at a time where it lies across
// the parameter: whole cache lines of a column are read once, and the rows that
// they are spread over are padded, or their beginnings would share cache sets.
constexpr int64_t kTileRows = 128;
constexpr int64_t kTileColumns = 256;
constexpr int64_t kTilePitch = kTileColumns + 16;
constexpr int64_t kTileRowsAhead = 3; // of the parameter

// One index per axis, the last running fastest.
class Odometer {
 public:
  Odometer(const std::vector<int64_t>& view, size_t axes, int64_t position)
      : view_(view), index_(axes) {
    for (size_t axis = axes; axis-- > 0;) {
      index_[axis] = position % view[axis];
      position /= view[axis];
    }
  }

  int64_t at(size_t axis) const {
    return index_[axis];
  }

  int64_t offset(const std::vector<int64_t>& strides) const {
    int64_t offset = 0;
    for (const auto axis : c10::irange(index_.size())) {
      offset += index_[axis] * strides[axis];
    }
    return offset;
  }

  void advance(int64_t steps) {
    for (size_t axis = index_.size(); axis-- > 0 && steps != 0;) {
      const int64_t sum = index_[axis] + steps;
      steps = sum / view_[axis];
      index_[axis] = sum % view_[axis];
    }
  }

 private:
  const std::vector<int64_t>& view_;
  std::vector<int64_t> index_;
};

template <class C>
void raise(std::vector<C>& to, const std::vector<C>& from) {
  for (const auto i : c10::irange(from.size())) {
    to[i] = std::max(to[i], from[i]);
  }
}

// New numbers: one vector per group, empty where it is written elsewhere, and
// one for the columns of all rows where several groups make them up.
template <class C>
struct Numbers {
  std::vector<std::vector<C>> groups;
  std::vector<C> columns;
};

template <class C>
class Pass {
 public:
  Pass(
      const SM3Geometry& geometry,
      const std::vector<const C*>& old,
      const SM3Coefficients<C>& coefficients,
      SM3RowFunction<C> kernel)
      : g_(geometry),
        old_(old),
        k_(coefficients),
        kernel_(kernel),
        rows_(sm3_rows(geometry)) {
    // Without elements there are no rows, and a view to divide by may hold a 0.
    if (rows_.kind == SM3Rows::Kind::kRows && g_.begin != g_.end) {
      find_columns();
    }
  }

  SM3Maxima<C> run() {
    for (const SM3Group& group : g_.groups) {
      total_.groups.emplace_back(group.numel, C(0));
    }
    if (g_.begin == g_.end) {
      return std::move(total_.groups);
    }
    const bool by_rows = rows_.kind == SM3Rows::Kind::kRows;
    const int64_t unit = by_rows ? rows_.length : g_.aligned;
    if (by_rows && direct_ < 0) {
      total_.columns.assign(rows_.length, C(0));
    }
    // Rows are those of the view; aligned elements count from where the part
    // begins.
    const int64_t origin = by_rows ? 0 : g_.begin;
    const int64_t first = (g_.begin - origin) / unit;
    const int64_t last = (g_.end - origin + unit - 1) / unit;
    const int64_t grain = std::max<int64_t>(1, kSM3Grain / unit);
    at::parallel_for(first, last, grain, [&](int64_t begin, int64_t end) {
      const bool alone = begin == first && end == last;
      Numbers<C> mine = alone ? Numbers<C>{} : private_numbers();
      if (by_rows) {
        walk_rows(begin, end, mine);
      } else {
        walk_elements(
            origin + begin * unit, std::min(origin + end * unit, g_.end), mine);
      }
      merge(mine);
    });
    if (!total_.columns.empty()) {
      spread_columns();
    }
    return std::move(total_.groups);
  }

 private:
  size_t axes() const {
    return g_.view.size();
  }

  bool in_row(const SM3Group& group) const {
    for (size_t axis = rows_.outer; axis < axes(); ++axis) {
      if (group.strides[axis] != 0 && g_.view[axis] != 1) {
        return true;
      }
    }
    return false;
  }

  // Which groups differ within a row. One that has a number for every element
  // is read and written where it is; others are combined into one vector.
  void find_columns() {
    std::vector<size_t> vectors;
    for (const auto i : c10::irange(g_.groups.size())) {
      (in_row(g_.groups[i]) ? vectors : shared_).push_back(i);
    }
    if (vectors.size() == 1) {
      int64_t own = 1;
      for (size_t axis = rows_.outer; axis < axes(); ++axis) {
        own *= g_.groups[vectors[0]].strides[axis] != 0 ? g_.view[axis] : 1;
      }
      if (own == rows_.length) {
        direct_ = static_cast<int64_t>(vectors[0]);
        return;
      }
    }
    columns_.assign(rows_.length, SM3Limits<C>::kMax);
    if (!old_.empty()) {
      for_row_numbers([&](size_t i, int64_t column, int64_t number) {
        columns_[column] = std::min(columns_[column], old_[i][number]);
      });
    }
  }

  // Calls `body(group, column, number)` for all vectors of a row.
  template <class Body>
  void for_row_numbers(const Body& body) const {
    for (const auto i : c10::irange(g_.groups.size())) {
      if (!in_row(g_.groups[i])) {
        continue;
      }
      Odometer index(g_.view, axes(), 0);
      for (const auto column : c10::irange(rows_.length)) {
        body(i, column, index.offset(g_.groups[i].strides));
        index.advance(1);
      }
    }
  }

  void spread_columns() {
    for_row_numbers([&](size_t i, int64_t column, int64_t number) {
      C& to = total_.groups[i][number];
      to = std::max(to, total_.columns[column]);
    });
  }

  // A group that has all axes outside a row belongs to one row at a time, so
  // threads never meet in it.
  bool is_exclusive(const SM3Group& group) const {
    if (rows_.kind != SM3Rows::Kind::kRows) {
      return group.numel == g_.numel;
    }
    for (size_t axis = 0; axis < rows_.outer; ++axis) {
      if (group.strides[axis] == 0 && g_.view[axis] != 1) {
        return false;
      }
    }
    // Parts of one row may be in two threads only if the row is cut, and rows
    // are not.
    return true;
  }

  Numbers<C> private_numbers() const {
    Numbers<C> mine;
    for (const SM3Group& group : g_.groups) {
      const bool shared =
          !is_exclusive(group) && (total_.columns.empty() || !in_row(group));
      mine.groups.emplace_back(shared ? group.numel : 0, C(0));
    }
    mine.columns.assign(total_.columns.size(), C(0));
    return mine;
  }

  void merge(const Numbers<C>& mine) {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (const auto i : c10::irange(mine.groups.size())) {
      raise(total_.groups[i], mine.groups[i]);
    }
    raise(total_.columns, mine.columns);
  }

  C* numbers_of(Numbers<C>& mine, size_t group) {
    return mine.groups.empty() || mine.groups[group].empty()
               ? total_.groups[group].data()
               : mine.groups[group].data();
  }

  // --- rows -----------------------------------------------------------------

  // The part of row `r` from `column` on, all but its gradient.
  SM3Row<C> make_row(
      int64_t r,
      const Odometer& index,
      int64_t column,
      int64_t count,
      Numbers<C>& mine) {
    SM3Row<C> row{};
    row.tensors = &g_.tensors;
    row.first = r * rows_.length + column - g_.begin;
    row.count = count;
    row.smallest = SM3Limits<C>::kMax;
    if (!old_.empty()) {
      for (const size_t i : shared_) {
        const C number = old_[i][index.offset(g_.groups[i].strides)];
        row.smallest = std::min(row.smallest, number);
      }
    }
    if (direct_ >= 0) {
      const int64_t at = index.offset(g_.groups[direct_].strides) + column;
      row.column = old_.empty() ? nullptr : old_[direct_] + at;
      row.new_column = numbers_of(mine, direct_) + at;
    } else {
      std::vector<C>& to = mine.groups.empty() ? total_.columns : mine.columns;
      row.column = columns_.data() + column;
      row.new_column = to.data() + column;
    }
    return row;
  }

  void keep_largest(const Odometer& index, C largest, Numbers<C>& mine) {
    for (const size_t i : shared_) {
      C& to = numbers_of(mine, i)[index.offset(g_.groups[i].strides)];
      to = std::max(to, largest);
    }
  }

  void walk_rows(int64_t begin, int64_t end, Numbers<C>& mine) {
    if (lies_across()) {
      walk_tiles(begin, end, mine);
      return;
    }
    Odometer index(g_.view, rows_.outer, begin);
    for (int64_t r = begin; r < end; ++r, index.advance(1)) {
      const int64_t start = r * rows_.length;
      const int64_t from = std::max<int64_t>(0, g_.begin - start);
      const int64_t to = std::min(rows_.length, g_.end - start);
      const SM3Row<C> row = make_row(r, index, from, to - from, mine);
      keep_largest(index, kernel_(row, k_), mine);
    }
  }

  // True if neighbours in memory of the gradient are neighbours of a column.
  bool lies_across() const {
    const SM3Strided& grad = g_.tensors.grad;
    return grad.dims == 2 && grad.sizes[1] == rows_.length &&
           grad.strides[0] == 1 && grad.strides[1] > 1 &&
           g_.tensors.scales == nullptr;
  }

  void walk_tiles(int64_t begin, int64_t end, Numbers<C>& mine) {
    std::vector<C> tile(kTileRows * kTilePitch);
    for (int64_t r0 = begin; r0 < end; r0 += kTileRows) {
      const int64_t rows = std::min(kTileRows, end - r0);
      for (int64_t c0 = 0; c0 < rows_.length; c0 += kTileColumns) {
        const int64_t columns = std::min(kTileColumns, rows_.length - c0);
        turn(r0, rows, c0, columns, tile.data());
        Odometer index(g_.view, rows_.outer, r0);
        for (int64_t r = 0; r < rows; ++r, index.advance(1)) {
          SM3Row<C> row = make_row(r0 + r, index, c0, columns, mine);
          row.grad = tile.data() + r * kTilePitch;
          row.ahead = kTileRowsAhead * rows_.length;
          keep_largest(index, kernel_(row, k_), mine);
        }
      }
    }
  }

  void turn(int64_t r0, int64_t rows, int64_t c0, int64_t columns, C* tile) {
    switch (g_.tensors.grad.kind) {
      case ScalarKind::kFloat16:
        return turn_as<Half>(r0, rows, c0, columns, tile);
      case ScalarKind::kBFloat16:
        return turn_as<BFloat16>(r0, rows, c0, columns, tile);
      case ScalarKind::kFloat64:
        return turn_as<double>(r0, rows, c0, columns, tile);
      case ScalarKind::kFloat32:
        return turn_as<float>(r0, rows, c0, columns, tile);
    }
  }

  template <class T>
  void turn_as(int64_t r0, int64_t rows, int64_t c0, int64_t columns, C* tile) {
    const int64_t stride = g_.tensors.grad.strides[1];
    const T* const grad =
        static_cast<const T*>(g_.tensors.grad.data) + r0 + c0 * stride;
    if constexpr (std::is_same_v<C, float> && std::is_same_v<T, float>) {
      turn_(grad, stride, rows, columns, tile, kTilePitch);
      return;
    }
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t r = 0; r < rows; ++r) {
        if constexpr (std::is_same_v<C, double>) {
          tile[r * kTilePitch + c] = to_double(grad[r + c * stride]);
        } else if constexpr (!std::is_same_v<T, double>) {
          tile[r * kTilePitch + c] = to_float(grad[r + c * stride]);
        }
      }
    }
  }

  // --- elements -------------------------------------------------------------

  // Any cover: the least numbers of a piece are gathered into an array, which
  // the kernel takes for a full-size accumulator, and what it leaves there is
  // scattered again.
  void walk_elements(int64_t begin, int64_t end, Numbers<C>& mine) {
    alignas(64) C bounds[kSM3Piece];
    for (int64_t at = begin; at < end;) {
      const int64_t first = at - g_.begin;
      const int64_t count = sm3_piece(g_.tensors, first, end - at);
      gather_bounds(at, count, bounds);
      SM3Row<C> row{};
      row.tensors = &g_.tensors;
      row.first = first;
      row.count = count;
      row.column = bounds;
      row.new_column = bounds;
      row.diagonal = true;
      kernel_(row, k_);
      for_runs(
          at,
          count,
          [&](size_t i, auto offset, auto stride, auto n, auto from) {
            C* to = numbers_of(mine, i);
            for (int64_t j = 0; j < n; ++j) {
              C& number = to[offset + j * stride];
              number = std::max(number, bounds[from + j]);
            }
          });
      at += count;
    }
  }

  void gather_bounds(int64_t first, int64_t count, C* bounds) const {
    if (old_.empty()) {
      std::fill_n(bounds, count, C(0));
      return;
    }
    std::fill_n(bounds, count, SM3Limits<C>::kMax);
    for_runs(
        first, count, [&](size_t i, auto offset, auto stride, auto n, auto to) {
          for (int64_t j = 0; j < n; ++j) {
            const C number = old_[i][offset + j * stride];
            bounds[to + j] = std::min(bounds[to + j], number);
          }
        });
  }

  // Calls `body(group, offset, stride, count, position)` for the runs along the
  // last axis that make up the elements [first, first + count) of the view.
  template <class Body>
  void for_runs(int64_t first, int64_t count, const Body& body) const {
    const size_t last = axes() - 1;
    Odometer index(g_.view, axes(), first);
    for (int64_t position = 0; position < count;) {
      const int64_t run =
          std::min(count - position, g_.view[last] - index.at(last));
      for (const auto i : c10::irange(g_.groups.size())) {
        const auto& strides = g_.groups[i].strides;
        body(i, index.offset(strides), strides[last], run, position);
      }
      position += run;
      index.advance(run);
    }
  }

  const SM3Geometry& g_;
  const std::vector<const C*>& old_;
  const SM3Coefficients<C>& k_;
  const SM3RowFunction<C> kernel_;
  const decltype(&sm3_turn_scalar) turn_ = SM3RowKernels<C>().turn;
  const SM3Rows rows_;
  std::vector<size_t> shared_; // groups with one number for a whole row
  int64_t direct_ = -1;        // the only other group, or none such
  std::vector<C> columns_;     // without: their least numbers, by column
  Numbers<C> total_;
  std::mutex mutex_;
};

} // namespace

template <class C>
SM3Maxima<C> sm3_dense_pass(
    const SM3Geometry& geometry,
    const std::vector<const C*>& old,
    const SM3Coefficients<C>& coefficients,
    SM3RowFunction<C> kernel) {
  return Pass<C>(geometry, old, coefficients, kernel).run();
}

template SM3Maxima<float> sm3_dense_pass(
    const SM3Geometry&,
    const std::vector<const float*>&,
    const SM3Coefficients<float>&,
    SM3RowFunction<float>);
template SM3Maxima<double> sm3_dense_pass(
    const SM3Geometry&,
    const std::vector<const double*>&,
    const SM3Coefficients<double>&,
    SM3RowFunction<double>);

} // namespace torch_sm3
