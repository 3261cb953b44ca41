// SPDX-License-Identifier: Apache-2.0
#include <sm3_kernel.h>
#include <sm3_update.h>
#include <torch_sm3/library.h>

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <mutex>

namespace torch_sm3 {
namespace {

// Elements that are worth a thread.
constexpr int64_t kGrain = 32768;

template <class C>
using RowFunction = C (*)(const SM3Row<C>&, const SM3Coefficients<C>&);

template <class C>
RowFunction<C> row_function() {
#if defined(__x86_64__)
  switch (cpu_capability()) {
    case CpuCapability::kAvx512:
      return sm3_update_row_avx512;
    case CpuCapability::kAvx2:
      return sm3_update_row_avx2;
    default:
      break;
  }
#endif
  return sm3_update_row_scalar;
}

size_t element_size(ScalarKind kind) {
  return kind == ScalarKind::kFloat64   ? 8
         : kind == ScalarKind::kFloat32 ? 4
                                        : 2;
}

// Walks the rows of a view: one index per dimension before the last.
class RowWalk {
 public:
  RowWalk(const SM3Layout& layout, int64_t row)
      : layout_(layout), index_(layout.sizes.size() - 1) {
    for (size_t d = index_.size(); d-- > 0;) {
      index_[d] = row % layout.sizes[d];
      row /= layout.sizes[d];
    }
  }

  int64_t index(size_t d) const {
    return index_[d];
  }

  int64_t offset(const std::vector<int64_t>& strides) const {
    int64_t offset = 0;
    for (size_t d = 0; d < index_.size(); ++d) {
      offset += index_[d] * strides[d];
    }
    return offset;
  }

  void next() {
    for (size_t d = index_.size(); d-- > 0;) {
      if (++index_[d] < layout_.sizes[d]) {
        return;
      }
      index_[d] = 0;
    }
  }

 private:
  const SM3Layout& layout_;
  std::vector<int64_t> index_;
};

// The row at `walk`, from element `first` on, without accumulators.
template <class C>
SM3Row<C>
make_row(const SM3Layout& layout, const RowWalk& walk, int64_t first) {
  const auto at = [&](const void* base,
                      const std::vector<int64_t>& strides,
                      ScalarKind kind) -> void* {
    const int64_t offset = walk.offset(strides) + first * strides.back();
    return static_cast<char*>(const_cast<void*>(base)) +
           offset * static_cast<int64_t>(element_size(kind));
  };
  SM3Row<C> row{};
  row.param = at(layout.param, layout.param_strides, layout.param_kind);
  row.grad = at(layout.grad, layout.grad_strides, layout.grad_kind);
  if (layout.momentum != nullptr) {
    row.momentum =
        at(layout.momentum, layout.momentum_strides, layout.param_kind);
  }
  row.count = layout.sizes.back() - first;
  row.param_stride = layout.param_strides.back();
  row.grad_stride = layout.grad_strides.back();
  row.momentum_stride = layout.momentum_strides.back();
  row.param_kind = layout.param_kind;
  row.grad_kind = layout.grad_kind;
  row.diagonal = layout.diagonal;
  return row;
}

int64_t row_count(const SM3Layout& layout) {
  int64_t rows = 1;
  for (size_t d = 0; d + 1 < layout.sizes.size(); ++d) {
    rows *= layout.sizes[d];
  }
  return rows;
}

template <class C>
void update_diagonal(
    const SM3Layout& layout,
    C* accumulator,
    const SM3Coefficients<C>& k) {
  const RowFunction<C> update = row_function<C>();
  const int64_t columns = layout.sizes.back();
  const int64_t rows = row_count(layout);
  RowWalk walk(layout, 0);
  for (int64_t r = 0; r < rows; ++r, walk.next()) {
    at::parallel_for(0, columns, kGrain, [&](int64_t begin, int64_t end) {
      SM3Row<C> row = make_row<C>(layout, walk, begin);
      row.count = end - begin;
      row.column = accumulator + r * columns + begin;
      update(row, k);
    });
  }
}

// `old` holds one vector per dimension. All rows are read against the old
// numbers, so the new ones are gathered apart, by each thread for itself; a
// maximum does not depend on the order in which they are merged.
template <class C>
void update_rows(
    const SM3Layout& layout,
    const std::vector<C*>& old,
    const SM3Coefficients<C>& k) {
  const RowFunction<C> update = row_function<C>();
  const size_t last = layout.sizes.size() - 1;
  std::vector<int64_t> first(layout.sizes.size(), 0);
  for (size_t d = 1; d < first.size(); ++d) {
    first[d] = first[d - 1] + layout.sizes[d - 1];
  }
  const int64_t total = first[last] + layout.sizes[last];
  std::vector<C> merged(total, C(0));
  std::mutex mutex;
  const int64_t rows = row_count(layout);
  const int64_t grain = std::max<int64_t>(1, kGrain / layout.sizes[last]);
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<C> mine(total, C(0));
    RowWalk walk(layout, begin);
    for (int64_t r = begin; r < end; ++r, walk.next()) {
      SM3Row<C> row = make_row<C>(layout, walk, 0);
      row.smallest = std::numeric_limits<C>::max();
      for (size_t d = 0; d < last; ++d) {
        row.smallest = std::min(row.smallest, old[d][walk.index(d)]);
      }
      row.column = old[last];
      row.new_column = mine.data() + first[last];
      const C largest = update(row, k);
      for (size_t d = 0; d < last; ++d) {
        C& number = mine[first[d] + walk.index(d)];
        number = std::max(number, largest);
      }
    }
    const std::lock_guard<std::mutex> guard(mutex);
    for (int64_t i = 0; i < total; ++i) {
      merged[i] = std::max(merged[i], mine[i]);
    }
  });
  for (size_t d = 0; d <= last; ++d) {
    std::copy_n(merged.data() + first[d], layout.sizes[d], old[d]);
  }
}

template <class C>
void update_item(const SM3Arguments& arguments, const SM3Item& item) {
  const SM3Layout layout = sm3_layout(arguments, item);
  const auto k = sm3_coefficients<C>(arguments.hyperparameters);
  std::vector<C*> accumulators;
  for (size_t i = 0; i < item.cover.count(); ++i) {
    accumulators.push_back(arguments.accumulators[item.first_accumulator + i]
                               .template mutable_data_ptr<C>());
  }
  if (layout.diagonal) {
    update_diagonal<C>(layout, accumulators[0], k);
  } else {
    update_rows<C>(layout, accumulators, k);
  }
}

void sm3_update_cpu(
    at::TensorList params,
    at::TensorList grads,
    at::TensorList accumulators,
    at::TensorList momentum_buffers,
    at::TensorList steps,
    double lr,
    double momentum,
    double beta2,
    std::optional<double> eps,
    double weight_decay,
    bool maximize) {
  const SM3Arguments arguments{
      params,
      grads,
      accumulators,
      momentum_buffers,
      steps,
      sm3_hyperparameters(lr, momentum, beta2, eps, weight_decay, maximize)};
  const std::vector<SM3Item> items = check_sm3_update(arguments);
  for (const SM3Item& item : items) {
    const at::Tensor& param = params[item.index];
    if (param.numel() > 0) {
      if (param.scalar_type() == at::kDouble) {
        update_item<double>(arguments, item);
      } else {
        update_item<float>(arguments, item);
      }
    }
    *steps[item.index].mutable_data_ptr<int64_t>() += 1;
  }
  bump_sm3_versions(arguments);
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, CPU, m) {
  m.impl("sm3_update_", &sm3_update_cpu);
}

} // namespace torch_sm3
