// SPDX-License-Identifier: Apache-2.0
#include <sm3_pack.h>
#include <sm3_tables.h>

#include <c10/util/irange.h>

#include <algorithm>
#include <type_traits>

namespace torch_sm3 {
namespace {

bool differs(const SM3Geometry& g, const SM3Group& group, size_t axis) {
  return group.strides[axis] != 0 && g.view[axis] != 1;
}

bool differs_in_row(const SM3Geometry& g, const SM3Group& group, size_t outer) {
  for (size_t axis = outer; axis < g.view.size(); ++axis) {
    if (differs(g, group, axis)) {
      return true;
    }
  }
  return false;
}

// Rows in which the numbers of each column stay the same: the axes after the
// last one outside of a row that such a number depends on.
int64_t rows_of_columns(const SM3Geometry& g, size_t outer) {
  int64_t rows = 1;
  for (size_t axis = outer; axis-- > 0;) {
    for (const SM3Group& group : g.groups) {
      if (differs_in_row(g, group, outer) && differs(g, group, axis)) {
        return rows;
      }
    }
    rows *= g.view[axis];
  }
  return rows;
}

} // namespace

template <class C>
int32_t SM3Pack<C>::add_numbers(c10::IntArrayRef numbers) {
  const size_t first = numbers_.size();
  numbers_.insert(numbers_.end(), numbers.begin(), numbers.end());
  TORCH_INTERNAL_ASSERT(numbers_.size() < (size_t{1} << 31));
  return static_cast<int32_t>(first);
}

template <class C>
SM3DeviceStrided SM3Pack<C>::strided(const SM3Strided& tensor, int64_t length) {
  SM3DeviceStrided t = sm3_describe(tensor, numbers_);
  t.by_row = tensor.dims <= 1 || tensor.sizes[tensor.dims - 1] % length == 0;
  return t;
}

// All but the numbers and the tiles.
template <class C>
SM3DeviceTensor<C>
SM3Pack<C>::describe(const SM3Geometry& g, const SM3Clock& clock) {
  SM3DeviceTensor<C> t{};
  t.scales = g.tensors.scales;
  t.last = g.tensors.last;
  t.index_start = g.tensors.index_start;
  t.stochastic = g.tensors.stochastic;
  t.ordinal = clock.ordinal;
  t.key = clock.key;
  t.step = clock.step;
  t.begin = g.begin;
  t.end = g.end;
  t.length = 1;
  t.next = scratch_;
  t.axes = static_cast<int16_t>(g.view.size());
  t.view = add_numbers(g.view);
  t.groups = static_cast<int32_t>(groups_.size());
  return t;
}

template <class C>
void SM3Pack<C>::fill_tensors(
    const SM3Tensors& tensors,
    SM3DeviceTensor<C>& t) {
  t.param = strided(tensors.param, t.length);
  t.grad = strided(tensors.grad, t.length);
  t.momentum = strided(tensors.momentum, t.length);
  t.compensation = strided(tensors.compensation, t.length);
  t.index = strided(tensors.index, t.length);
}

/// \param apart new numbers go to scratch memory
template <class C>
void SM3Pack<C>::add_group(
    SM3DeviceTensor<C>& t,
    const SM3Group& group,
    C* kept,
    bool in_row,
    bool apart,
    bool assigned) {
  groups_.push_back(
      {kept,
       scratch_,
       group.numel,
       add_numbers(group.strides),
       in_row,
       assigned});
  ++t.group_count;
  if (apart) {
    scratch_ += group.numel;
    t.numbers += group.numel;
  }
}

// Rows that mean nothing, of a length that suits the kernels. They begin where
// the tensors do.
template <class C>
void SM3Pack<C>::cut_elements(const SM3Geometry& g, SM3DeviceTensor<C>& t) {
  const int64_t last = g.tensors.last;
  if (t.scales == nullptr || last % kSM3Block == 0) {
    t.length = kSM3Span;
  } else {
    t.length = last < kSM3Block ? kSM3Block / last * last : last;
  }
  t.origin = t.begin;
  t.unit = t.length;
  t.period = sm3_ceiling(t.end - t.begin, t.length);
  t.tile_rows = kSM3Warps;
}

template <class C>
void SM3Pack<C>::cut_rows(
    const SM3Geometry& g,
    size_t outer,
    SM3DeviceTensor<C>& t) {
  const int64_t last = g.tensors.last;
  t.origin = 0;
  t.outer = static_cast<int16_t>(outer);
  t.unit = t.length;
  if (t.scales != nullptr) {
    t.unit = last < kSM3Block ? kSM3Block / last * last : last;
  }
  t.period = rows_of_columns(g, outer);
  t.tile_rows = static_cast<int32_t>(std::min<int64_t>(kSM3TileRows, t.period));
}

template <class C>
void SM3Pack<C>::add(const SM3Geometry& g, const SM3Clock& clock) {
  SM3DeviceTensor<C> t = describe(g, clock);
  const SM3Rows rows = sm3_rows(g);
  // Blocks of momentum are counted from where the tensors begin.
  const bool whole = g.end - g.begin == g.numel;
  const bool by_rows =
      rows.kind == SM3Rows::Kind::kRows && (whole || t.scales == nullptr);
  // Of a part, the numbers of elements that are elsewhere move as well.
  const bool diagonal = rows.kind == SM3Rows::Kind::kDiagonal && whole;
  t.form = by_rows    ? SM3Form::kRows
           : diagonal ? SM3Form::kDiagonal
                      : SM3Form::kGeneral;
  if (by_rows) {
    t.length = rows.length;
    cut_rows(g, rows.outer, t);
  } else {
    cut_elements(g, t);
  }
  const int64_t per_unit = sm3_ceiling(t.unit, kSM3Span);
  t.spans =
      t.length / t.unit * per_unit + sm3_ceiling(t.length % t.unit, kSM3Span);
  fill_tensors(g.tensors, t);
  for (const SM3Group& group : g.groups) {
    C* const kept = group.accumulator.template mutable_data_ptr<C>();
    const bool in_row = by_rows && differs_in_row(g, group, rows.outer);
    const bool apart = !diagonal && h_.variant != SM3Variant::kGiven;
    add_group(t, group, kept, in_row, apart, false);
  }
  t.vector = is_vector(t);
  if (g.begin < g.end) {
    add_tiles(t, list_of(t));
  }
  add_keep_tiles(t);
  tensors_.push_back(t);
}

template <class C>
void SM3Pack<C>::add_maxima(const SM3Geometry& g, const std::vector<C*>& out) {
  SM3DeviceTensor<C> t = describe(g, {});
  const SM3Rows rows = sm3_rows(g);
  const bool by_rows = g.numel > 0 && rows.kind == SM3Rows::Kind::kRows;
  t.form = by_rows ? SM3Form::kRows : SM3Form::kGeneral;
  if (by_rows) {
    t.length = rows.length;
    cut_rows(g, rows.outer, t);
  } else {
    cut_elements(g, t);
  }
  t.spans = sm3_ceiling(t.length, kSM3Span);
  t.grad = strided(g.tensors.grad, t.length);
  for (const auto i : c10::irange(g.groups.size())) {
    const bool in_row = by_rows && differs_in_row(g, g.groups[i], rows.outer);
    add_group(t, g.groups[i], out[i], in_row, true, false);
  }
  if (g.numel > 0) {
    add_tiles(t, kSM3Lists - 1);
  }
  add_keep_tiles(t);
  tensors_.push_back(t);
}

template <class C>
void SM3Pack<C>::add_sparse(
    const SM3Geometry& g,
    const std::vector<SM3SparseGroup>& groups,
    const SM3Clock& clock) {
  SM3DeviceTensor<C> t = describe(g, clock);
  t.form = SM3Form::kGeneral;
  fill_tensors(g.tensors, t);
  for (const SM3SparseGroup& chosen : groups) {
    const SM3Group& group = g.groups[chosen.index];
    C* const kept = group.accumulator.template mutable_data_ptr<C>();
    const bool apart = group.numel != g.numel;
    add_group(t, group, kept, false, apart, chosen.assigned);
  }
  tensors_.push_back(t);
}

template <class C>
void SM3Pack<C>::add_empty(int64_t* step) {
  SM3DeviceTensor<C> t{};
  t.step = step;
  tensors_.push_back(t);
}

// --- which kernel -----------------------------------------------------------

template <class C>
size_t SM3Pack<C>::list_of(const SM3DeviceTensor<C>& t) const {
  const bool moves_in_place = t.form == SM3Form::kDiagonal && !h_.keep_larger;
  const bool plain_momentum =
      t.momentum.data == nullptr ||
      (t.scales == nullptr && t.momentum.kind == t.param.kind);
  const bool plain_types =
      t.param.kind != ScalarKind::kFloat64 &&
      (t.param.kind == ScalarKind::kFloat32 ||
       t.grad.kind == ScalarKind::kFloat32 || t.grad.kind == t.param.kind);
  const bool plain =
      plain_types && (t.form == SM3Form::kRows || moves_in_place) &&
      plain_momentum && t.compensation.data == nullptr && !t.stochastic &&
      t.param.by_row && t.grad.by_row && t.momentum.by_row;
  if (!plain) {
    return kSM3Lists - 1;
  }
  return t.param.kind == ScalarKind::kFloat16    ? 1
         : t.param.kind == ScalarKind::kBFloat16 ? 2
                                                 : 0;
}

// True if packs of a row that begins at a multiple of the pack's size can be
// read at once.
template <class C>
bool SM3Pack<C>::is_aligned(const SM3DeviceStrided& t) const {
  if (t.data == nullptr) {
    return true;
  }
  const int64_t bytes =
      std::min<int64_t>(kSM3Align, kSM3Pack * size_of(t.kind));
  bool aligned =
      t.stride == 1 && reinterpret_cast<uintptr_t>(t.data) % bytes == 0;
  for (int d = 0; d + 1 < t.dims; ++d) {
    aligned = aligned && numbers_[t.shape + t.dims + d] % kSM3Pack == 0;
  }
  return aligned;
}

template <class C>
bool SM3Pack<C>::is_vector(const SM3DeviceTensor<C>& t) const {
  bool aligned = is_aligned(t.param) && is_aligned(t.grad) &&
                 is_aligned(t.momentum) && t.length % kSM3Pack == 0 &&
                 (t.begin - t.origin) % kSM3Pack == 0 &&
                 (t.end - t.origin) % kSM3Pack == 0;
  if (t.form == SM3Form::kDiagonal) {
    const C* const kept = groups_[t.groups].kept + t.origin;
    aligned = aligned && reinterpret_cast<uintptr_t>(kept) % kSM3Align == 0;
  }
  return aligned;
}

// --- tiles ------------------------------------------------------------------

template <class C>
void SM3Pack<C>::add_tiles(const SM3DeviceTensor<C>& t, size_t list) {
  const int64_t per_period = sm3_ceiling(t.period, t.tile_rows);
  const auto tile_of = [&](int64_t row) {
    return row / t.period * per_period + row % t.period / t.tile_rows;
  };
  const int64_t first = (t.begin - t.origin) / t.length;
  const int64_t last = (t.end - t.origin - 1) / t.length;
  for (int64_t tile = tile_of(first); tile <= tile_of(last); ++tile) {
    for (int64_t span = 0; span < t.spans; ++span) {
      tiles_[list].push_back(sm3_tile(tensors_.size(), tile * t.spans + span));
    }
  }
}

template <class C>
void SM3Pack<C>::add_keep_tiles(const SM3DeviceTensor<C>& t) {
  for (int64_t i = 0; i < sm3_ceiling(t.numbers, kSM3KeepTile); ++i) {
    keep_tiles_.push_back(sm3_tile(tensors_.size(), i));
  }
}

// --- memory -----------------------------------------------------------------

template <class C>
typename SM3Pack<C>::Layout SM3Pack<C>::layout() const {
  Layout l{};
  l.groups = sm3_bytes(tensors_);
  l.numbers = l.groups + sm3_bytes(groups_);
  l.tiles = l.numbers + sm3_bytes(numbers_);
  int64_t tiles = 0;
  for (const auto& list : tiles_) {
    tiles += static_cast<int64_t>(list.size());
  }
  l.keep_tiles =
      l.tiles + sm3_align(tiles * static_cast<int64_t>(sizeof(SM3Tile)));
  l.state = l.keep_tiles + sm3_bytes(keep_tiles_);
  l.next = l.state + sm3_align(static_cast<int64_t>(sizeof(SM3DeviceState<C>)));
  l.end = l.next + sm3_align(scratch_ * static_cast<int64_t>(sizeof(C)));
  return l;
}

template <class C>
void SM3Pack<C>::write(char* host) const {
  static_assert(std::is_trivially_copyable_v<SM3DeviceTensor<C>>);
  const Layout l = layout();
  sm3_put(tensors_, host);
  sm3_put(groups_, host + l.groups);
  sm3_put(numbers_, host + l.numbers);
  char* tiles = host + l.tiles;
  for (const auto& list : tiles_) {
    sm3_put(list, tiles);
    tiles += list.size() * sizeof(SM3Tile);
  }
  sm3_put(keep_tiles_, host + l.keep_tiles);
}

template <class C>
SM3Table<C> SM3Pack<C>::table(char* memory) const {
  const Layout l = layout();
  return {
      reinterpret_cast<SM3DeviceTensor<C>*>(memory),
      reinterpret_cast<const SM3DeviceGroup<C>*>(memory + l.groups),
      reinterpret_cast<const int64_t*>(memory + l.numbers),
      reinterpret_cast<const SM3Tile*>(memory + l.tiles),
      reinterpret_cast<const SM3Tile*>(memory + l.keep_tiles),
      reinterpret_cast<SM3DeviceState<C>*>(memory + l.state),
      reinterpret_cast<C*>(memory + l.next)};
}

template <class C>
SM3DenseLaunch<C>
SM3Pack<C>::dense(char* memory, const SM3DeviceOptions& options) const {
  SM3DenseLaunch<C> launch{};
  launch.table = table(memory);
  launch.options = options;
  launch.tensors = static_cast<int64_t>(tensors_.size());
  launch.scratch = scratch_;
  for (int i = 0; i < kSM3Lists; ++i) {
    launch.tiles[i] = static_cast<int64_t>(tiles_[i].size());
  }
  launch.keep_tiles = static_cast<int64_t>(keep_tiles_.size());
  return launch;
}

template class SM3Pack<float>;
template class SM3Pack<double>;

} // namespace torch_sm3
