// SPDX-License-Identifier: Apache-2.0
#include <sm3_cpu.h>

#include <ATen/Parallel.h>
#include <c10/util/irange.h>

#include <algorithm>

namespace torch_sm3 {
namespace {

template <class C>
C* numbers(const SM3Group& group) {
  return group.accumulator.mutable_data_ptr<C>();
}

template <class C>
std::vector<const C*> numbers_of(const SM3Geometry& g) {
  std::vector<const C*> all;
  for (const SM3Group& group : g.groups) {
    all.push_back(numbers<C>(group));
  }
  return all;
}

// A row of a full-size accumulator, which is replaced where it is.
template <class C>
SM3Row<C>
diagonal_row(const SM3Geometry& g, int64_t begin, int64_t end, C* bounds) {
  SM3Row<C> row{};
  row.tensors = &g.tensors;
  row.first = begin - g.begin;
  row.count = end - begin;
  row.column = bounds;
  row.new_column = bounds;
  row.diagonal = true;
  return row;
}

// A full-size accumulator that never decreases: nu need not be what is kept.
template <class C>
void update_larger(
    const SM3Geometry& g,
    const SM3Hyperparameters& h,
    const SM3Coefficients<C>& coefficients,
    int64_t begin,
    int64_t end) {
  const SM3RowKernels<C> kernels;
  C* const kept = numbers<C>(g.groups[0]);
  const bool first = h.variant == SM3Variant::kI;
  SM3Coefficients<C> k = coefficients;
  k.given = k.given || first;
  alignas(64) C bounds[kSM3Piece];
  for (int64_t at = begin; at < end;) {
    const int64_t count = sm3_piece(g.tensors, at - g.begin, end - at);
    const SM3Row<C> row = diagonal_row(g, at, at + count, bounds);
    if (first) {
      std::fill_n(bounds, count, C(0));
      kernels.maxima(row, k);
      for (int64_t j = 0; j < count; ++j) {
        bounds[j] =
            std::max(kept[at + j], sm3_accumulate(kept[at + j], bounds[j], k));
      }
    } else {
      std::copy_n(kept + at, count, bounds);
    }
    kernels.update(row, k);
    for (int64_t j = 0; j < count; ++j) {
      kept[at + j] = std::max(kept[at + j], bounds[j]);
    }
    at += count;
  }
}

// Of a part of a flat tensor: numbers whose elements are all elsewhere. What is
// left here must not outweigh the new ones of other parts.
template <class C>
void forget_others(
    const SM3Geometry& g,
    const SM3Hyperparameters& h,
    const SM3Coefficients<C>& k,
    C* kept) {
  const auto forget = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      kept[i] =
          h.variant == SM3Variant::kI ? sm3_accumulate(kept[i], C(0), k) : C(0);
    }
  };
  forget(0, g.begin);
  forget(g.end, g.groups[0].numel);
}

template <class C>
void update_diagonal(
    const SM3Geometry& g,
    const SM3Hyperparameters& h,
    const SM3Coefficients<C>& k) {
  const SM3RowKernels<C> kernels;
  C* const kept = numbers<C>(g.groups[0]);
  const int64_t unit = g.aligned;
  const int64_t grain = std::max<int64_t>(1, kSM3Grain / unit);
  const int64_t units = (g.end - g.begin + unit - 1) / unit;
  at::parallel_for(0, units, grain, [&](int64_t first, int64_t past) {
    const int64_t begin = g.begin + first * unit;
    const int64_t end = std::min(g.end, g.begin + past * unit);
    if (h.keep_larger) {
      update_larger(g, h, k, begin, end);
    } else {
      kernels.update(diagonal_row(g, begin, end, kept + begin), k);
    }
  });
  if (!k.given && !h.keep_larger) {
    forget_others(g, h, k, kept);
  }
}

} // namespace

template <class C>
void sm3_dense_update(
    const SM3Geometry& g,
    const SM3Hyperparameters& h,
    const SM3Coefficients<C>& coefficients) {
  const SM3RowKernels<C> kernels;
  if (sm3_rows(g).kind == SM3Rows::Kind::kDiagonal) {
    update_diagonal(g, h, coefficients);
    return;
  }
  SM3Coefficients<C> k = coefficients;
  const std::vector<const C*> old = numbers_of<C>(g);
  const auto keep = [&](size_t group, const auto& next) {
    C* const kept = numbers<C>(g.groups[group]);
    for (const auto i : c10::irange(g.groups[group].numel)) {
      const C number = next(kept[i], i);
      kept[i] = h.keep_larger ? std::max(kept[i], number) : number;
    }
  };
  if (h.variant == SM3Variant::kI) {
    const SM3Maxima<C> squares = sm3_dense_pass<C>(g, {}, k, kernels.maxima);
    for (const auto group : c10::irange(g.groups.size())) {
      keep(group, [&](C before, int64_t i) {
        return sm3_accumulate(before, squares[group][i], k);
      });
    }
    k.given = true;
  }
  const SM3Maxima<C> bounds = sm3_dense_pass<C>(g, old, k, kernels.update);
  if (h.variant == SM3Variant::kII) {
    for (const auto group : c10::irange(g.groups.size())) {
      keep(group, [&](C, int64_t i) { return bounds[group][i]; });
    }
  }
}

template void sm3_dense_update(
    const SM3Geometry&,
    const SM3Hyperparameters&,
    const SM3Coefficients<float>&);
template void sm3_dense_update(
    const SM3Geometry&,
    const SM3Hyperparameters&,
    const SM3Coefficients<double>&);

} // namespace torch_sm3
