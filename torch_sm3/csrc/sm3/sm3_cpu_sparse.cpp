// SPDX-License-Identifier: Apache-2.0
#include <sm3_cpu.h>
#include <sm3_sparse.h>

#include <ATen/Parallel.h>
#include <c10/util/irange.h>

#include <algorithm>
#include <unordered_map>

namespace torch_sm3 {
namespace {

// How far ahead of its update a row is asked for: in rows, and at most this
// much of each.
constexpr int64_t kAhead = 8;
constexpr int64_t kMostAhead = 1024;
constexpr int64_t kLine = 64;

template <class C>
class SparseUpdate {
 public:
  SparseUpdate(
      const SM3Geometry& g,
      const SM3Hyperparameters& h,
      const SM3Coefficients<C>& k,
      const at::Tensor& indices,
      const at::Tensor& values,
      c10::IntArrayRef sizes)
      : g_(g),
        h_(h),
        k_(k),
        values_(values.const_data_ptr<C>()),
        count_(indices.size(1)) {
    chunk_ = 1;
    for (int64_t d = indices.size(0); d < static_cast<int64_t>(sizes.size());
         ++d) {
      chunk_ *= sizes[d];
    }
    find_starts(indices, sizes);
    groups_ =
        sm3_sparse_groups(g, h, sizes.empty() ? 1 : sizes[0], indices.size(0));
    lazy_ = h.beta2 < 1;
  }

  void run() {
    bounds_.resize(count_ * chunk_);
    if (h_.variant == SM3Variant::kI) {
      accumulate_squares();
      k_.given = true;
    }
    at::parallel_for(0, count_, grain(), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        prefetch(n + kAhead);
        update_chunk(n);
      }
    });
    for (const auto i : c10::irange(groups_.size())) {
      for (int64_t n = 0; !groups_[i].alone && n < count_; ++n) {
        if (h_.variant == SM3Variant::kII) {
          keep_bounds(i, n);
        }
      }
    }
  }

 private:
  int64_t grain() const {
    return std::max<int64_t>(1, kSM3Grain / std::max<int64_t>(1, chunk_));
  }

  // Named rows lie anywhere, so the hardware cannot see them coming.
  void prefetch(int64_t n) const {
    const SM3Strided& param = g_.tensors.param;
    if (n >= count_ || param.dims != 1 || param.strides[0] != 1) {
      return;
    }
    const int64_t bytes = std::min(chunk_ * size_of(param.kind), kMostAhead);
    const char* const row =
        static_cast<const char*>(param.data) + starts_[n] * size_of(param.kind);
    for (int64_t at = 0; at < bytes; at += kLine) {
      __builtin_prefetch(row + at);
    }
  }

  // The first element of each named row.
  void find_starts(const at::Tensor& indices, c10::IntArrayRef sizes) {
    const at::Tensor coordinates = indices.contiguous();
    const auto* at = coordinates.const_data_ptr<int64_t>();
    starts_.assign(count_, 0);
    int64_t after = chunk_;
    for (int64_t d = indices.size(0); d-- > 0;) {
      for (const auto n : c10::irange(count_)) {
        starts_[n] += at[d * count_ + n] * after;
      }
      after *= sizes[d];
    }
  }

  C* numbers(size_t i) const {
    return g_.groups[groups_[i].index]
        .accumulator.template mutable_data_ptr<C>();
  }

  // Calls `body(number, from, count, stride)` for the runs along the view's
  // last axis that make up a chunk: numbers `number + j * stride` of group `i`
  // belong to its elements `from + j`.
  template <class Body>
  void for_numbers(size_t i, int64_t n, const Body& body) const {
    const auto& strides = g_.groups[groups_[i].index].strides;
    const size_t last = g_.view.size() - 1;
    for (int64_t from = 0; from < chunk_;) {
      int64_t position = starts_[n] + from;
      const int64_t run =
          std::min(chunk_ - from, g_.view[last] - position % g_.view[last]);
      int64_t number = 0;
      for (size_t axis = g_.view.size(); axis-- > 0;) {
        number += position % g_.view[axis] * strides[axis];
        position /= g_.view[axis];
      }
      body(number, from, run, strides[last]);
      from += run;
    }
  }

  void update_chunk(int64_t n) {
    C* const bounds = bounds_.data() + n * chunk_;
    std::fill_n(bounds, chunk_, SM3Limits<C>::kMax);
    for (const auto i : c10::irange(groups_.size())) {
      const C* const old = numbers(i);
      for_numbers(i, n, [&](auto number, auto from, auto run, auto stride) {
        for (int64_t j = 0; j < run; ++j) {
          bounds[from + j] =
              std::min(bounds[from + j], old[number + j * stride]);
        }
      });
    }
    SM3Row<C> row{};
    row.tensors = &g_.tensors;
    row.first = starts_[n];
    row.count = chunk_;
    row.grad = values_ + n * chunk_;
    row.column = bounds;
    row.new_column = bounds;
    row.diagonal = true;
    kernels_.update(row, k_);
    for (const auto i : c10::irange(groups_.size())) {
      // No other row reads these numbers, and they are at hand now.
      if (groups_[i].alone && h_.variant == SM3Variant::kII) {
        keep_bounds(i, n);
      }
    }
  }

  // Sets that lie in one row were seen whole and are assigned; of others only
  // the largest number is known to hold.
  void keep_bounds(size_t i, int64_t n) {
    C* const kept = numbers(i);
    if (groups_[i].assigned) {
      for_numbers(i, n, [&](auto number, auto, auto run, auto stride) {
        for (int64_t j = 0; j < run; ++j) {
          kept[number + j * stride] = 0;
        }
      });
    }
    const C* const bounds = bounds_.data() + n * chunk_;
    for_numbers(i, n, [&](auto number, auto from, auto run, auto stride) {
      if (stride == 0) {
        const C largest = *std::max_element(bounds + from, bounds + from + run);
        kept[number] = std::max(kept[number], largest);
        return;
      }
      for (int64_t j = 0; j < run; ++j) {
        C& to = kept[number + j * stride];
        to = std::max(to, bounds[from + j]);
      }
    });
  }

  // Variant I: the numbers of all touched sets move before anything is updated.
  void accumulate_squares() {
    std::unordered_map<int64_t, C> largest;
    for (const auto i : c10::irange(groups_.size())) {
      largest.clear();
      for (const auto n : c10::irange(count_)) {
        const C* const grad = values_ + n * chunk_;
        for_numbers(i, n, [&](auto number, auto from, auto run, auto stride) {
          for (int64_t j = 0; j < run; ++j) {
            C& to = largest[number + j * stride];
            to = std::max(to, sm3_square(k_.scale * grad[from + j]));
          }
        });
      }
      C* const kept = numbers(i);
      const bool larger = h_.keep_larger || (lazy_ && !groups_[i].assigned);
      for (const auto& [number, square] : largest) {
        const C moved = sm3_accumulate(kept[number], square, k_);
        kept[number] = larger ? std::max(kept[number], moved) : moved;
      }
    }
  }

  const SM3Geometry& g_;
  const SM3Hyperparameters& h_;
  SM3Coefficients<C> k_;
  const SM3RowKernels<C> kernels_;
  const C* const values_;
  const int64_t count_; // named rows
  int64_t chunk_;       // elements of each
  std::vector<int64_t> starts_;
  std::vector<SM3SparseGroup> groups_; // accumulators that take part
  std::vector<C> bounds_;
  bool lazy_;
};

} // namespace

template <class C>
void sm3_sparse_update(
    const SM3Geometry& g,
    const SM3Hyperparameters& h,
    const SM3Coefficients<C>& k,
    const at::Tensor& indices,
    const at::Tensor& values,
    c10::IntArrayRef sizes) {
  SparseUpdate<C>(g, h, k, indices, values, sizes).run();
}

template void sm3_sparse_update(
    const SM3Geometry&,
    const SM3Hyperparameters&,
    const SM3Coefficients<float>&,
    const at::Tensor&,
    const at::Tensor&,
    c10::IntArrayRef);
template void sm3_sparse_update(
    const SM3Geometry&,
    const SM3Hyperparameters&,
    const SM3Coefficients<double>&,
    const at::Tensor&,
    const at::Tensor&,
    c10::IntArrayRef);

} // namespace torch_sm3
