// SPDX-License-Identifier: Apache-2.0
#include <scalar_kind.h>
#include <sm3_geometry.h>

#include <c10/util/irange.h>

#include <algorithm>
#include <numeric>

namespace torch_sm3 {

SM3Strided
sm3_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, void* data) {
  SM3Strided t;
  t.data = data;
  for (const auto d : c10::irange(sizes.size())) {
    if (sizes[d] == 1) {
      continue;
    }
    // A dimension whose steps go on where the one before ends is one with it.
    if (t.dims > 0 && t.strides[t.dims - 1] == sizes[d] * strides[d]) {
      t.sizes[t.dims - 1] *= sizes[d];
      t.strides[t.dims - 1] = strides[d];
      continue;
    }
    TORCH_CHECK_VALUE(
        t.dims < kSM3MaxDims,
        "sm3_update_: expected at most ",
        kSM3MaxDims,
        " dimensions that cannot be merged, but got strides ",
        strides,
        " (argument 'params')");
    t.sizes[t.dims] = sizes[d];
    t.strides[t.dims] = strides[d];
    ++t.dims;
  }
  if (t.dims == 0) {
    t.sizes[0] = 1;
    t.strides[0] = 1;
    t.dims = 1;
  }
  return t;
}

SM3Strided sm3_strided(const at::Tensor& tensor) {
  SM3Strided t = sm3_strided(
      tensor.sizes(),
      tensor.strides(),
      const_cast<void*>(tensor.const_data_ptr()));
  t.kind = scalar_kind(tensor.scalar_type());
  return t;
}

namespace {

// Dimensions that are not of size 1.
std::vector<int64_t> real_dims(const at::Tensor& param) {
  std::vector<int64_t> dims;
  for (const auto d : c10::irange(param.dim())) {
    if (param.size(d) != 1) {
      dims.push_back(d);
    }
  }
  return dims;
}

// The view may be walked in any order of its axes if each accumulator is the
// vector of one dimension. Returns the order in which the parameter's memory
// lies, or nothing where the logical order is as good or must be kept.
std::vector<int64_t> better_order(
    const SM3Arguments& a,
    const SM3Item& item,
    const SM3Geometry& geometry) {
  const at::Tensor& param = a.params[item.index];
  if (param.is_contiguous() || item.part || a.sparse() ||
      sm3_present(a.momentum_scales, item)) {
    return {};
  }
  const std::vector<int64_t> dims = real_dims(param);
  if (dims.size() != geometry.view.size()) {
    return {};
  }
  for (const auto axis : c10::irange(dims.size())) {
    if (geometry.view[axis] != param.size(dims[axis])) {
      return {};
    }
  }
  for (const uint64_t group : item.cover.groups) {
    if ((group & (group - 1)) != 0) {
      return {};
    }
  }
  std::vector<int64_t> order(dims.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) {
    return param.stride(dims[x]) > param.stride(dims[y]);
  });
  return order;
}

// The same tensor with the axes of a view in another order.
at::Tensor reorder(
    const at::Tensor& tensor,
    const std::vector<int64_t>& dims,
    const std::vector<int64_t>& order) {
  std::vector<int64_t> all;
  for (const int64_t axis : order) {
    all.push_back(dims[axis]);
  }
  for (const auto d : c10::irange(tensor.dim())) {
    if (tensor.size(d) == 1) {
      all.push_back(d);
    }
  }
  return tensor.permute(all);
}

void fill_index(
    const SM3Item& item,
    const at::Tensor& param,
    const std::vector<int64_t>& order,
    SM3Tensors& tensors) {
  std::vector<int64_t> strides = item.strides;
  if (strides.empty()) {
    strides.assign(param.dim(), 1);
    for (int64_t d = param.dim() - 1; d > 0; --d) {
      strides[d - 1] = strides[d] * param.size(d);
    }
  }
  const std::vector<int64_t> dims = real_dims(param);
  std::vector<int64_t> sizes;
  std::vector<int64_t> steps;
  for (const auto axis : c10::irange(dims.size())) {
    const int64_t d = dims[order.empty() ? axis : order[axis]];
    sizes.push_back(param.size(d));
    steps.push_back(strides[d]);
  }
  tensors.index = sm3_strided(sizes, steps, nullptr);
  tensors.index_start = item.start;
}

void fill_tensors(
    const SM3Arguments& a,
    const SM3Item& item,
    const std::vector<int64_t>& order,
    SM3Tensors& tensors) {
  const at::Tensor& param = a.params[item.index];
  const std::vector<int64_t> dims =
      order.empty() ? std::vector<int64_t>{} : real_dims(param);
  const auto strided = [&](const at::Tensor& tensor) {
    return sm3_strided(order.empty() ? tensor : reorder(tensor, dims, order));
  };
  tensors.param = strided(param);
  if (!a.sparse()) {
    tensors.grad = strided(a.grads[item.index]);
  }
  if (sm3_present(a.momentum_buffers, item)) {
    tensors.momentum = strided(a.momentum_buffers[item.index]);
  }
  if (sm3_present(a.momentum_scales, item)) {
    tensors.scales = a.momentum_scales[item.index].mutable_data_ptr<float>();
  }
  if (sm3_present(a.compensations, item)) {
    tensors.compensation = strided(a.compensations[item.index]);
  }
  tensors.last = param.dim() > 0 ? param.size(-1) : 1;
  tensors.stochastic =
      a.stochastic_rounding &&
      (param.scalar_type() == at::kBFloat16 || tensors.scales != nullptr);
  if (tensors.stochastic) {
    fill_index(item, param, order, tensors);
  }
}

// C-order strides of a group's accumulator over the view's axes.
std::vector<int64_t>
group_strides(const std::vector<int64_t>& view, uint64_t group) {
  std::vector<int64_t> strides(view.size(), 0);
  int64_t stride = 1;
  for (size_t axis = view.size(); axis-- > 0;) {
    if ((group >> axis & 1) != 0) {
      strides[axis] = stride;
      stride *= view[axis];
    }
  }
  return strides;
}

template <class T>
std::vector<T>
permuted(const std::vector<T>& values, const std::vector<int64_t>& order) {
  std::vector<T> result;
  for (const int64_t axis : order) {
    result.push_back(values[axis]);
  }
  return result;
}

} // namespace

SM3Geometry sm3_view(const SM3Cover& cover) {
  SM3Geometry g;
  g.numel = 1;
  for (const c10::SymInt& size : cover.view) {
    g.view.push_back(size.expect_int());
    g.numel *= g.view.back();
  }
  if (g.view.empty()) {
    g.view.push_back(1);
  }
  g.begin = 0;
  g.end = g.numel;
  g.aligned = 1;
  for (const uint64_t group : cover.groups) {
    std::vector<int64_t> strides = group_strides(g.view, group);
    int64_t numel = 1;
    for (const auto axis : c10::irange(g.view.size())) {
      numel *= strides[axis] != 0 ? g.view[axis] : 1;
    }
    g.groups.push_back({at::Tensor(), numel, std::move(strides)});
  }
  return g;
}

SM3Geometry sm3_geometry(const SM3Arguments& a, const SM3Item& item) {
  SM3Geometry g = sm3_view(item.cover);
  if (item.part) {
    g.begin = item.start;
    g.end = g.begin + a.params[item.index].numel();
  }
  const std::vector<int64_t> order = better_order(a, item, g);
  fill_tensors(a, item, order, g.tensors);
  if (g.tensors.scales != nullptr) {
    g.aligned = g.tensors.last;
  }
  for (const auto i : c10::irange(g.groups.size())) {
    SM3Group& group = g.groups[i];
    group.accumulator = a.accumulators[item.first_accumulator + i];
    if (!order.empty()) {
      group.strides = permuted(group.strides, order);
    }
  }
  if (!order.empty()) {
    g.view = permuted(g.view, order);
  }
  return g;
}

namespace {

// Rows shorter than this are not worth a call each; rows of the first length
// are worth no merging of further axes.
constexpr int64_t kShort = 16;
constexpr int64_t kLong = 256;

// True if a group has an axis in [from, to) that counts.
bool has_axis(
    const SM3Geometry& g,
    const SM3Group& group,
    size_t from,
    size_t to) {
  for (size_t axis = from; axis < to; ++axis) {
    if (group.strides[axis] != 0 && g.view[axis] != 1) {
      return true;
    }
  }
  return false;
}

// Every group is a number of the whole row, or a vector within it that is the
// same for all rows; or there is one vector only, which may differ by row, and
// it has a number for each element.
bool makes_rows(const SM3Geometry& g, size_t outer) {
  size_t vectors = 0;
  bool differs = false;
  int64_t length = 1;
  for (size_t axis = outer; axis < g.view.size(); ++axis) {
    length *= g.view[axis];
  }
  bool whole = true;
  for (const SM3Group& group : g.groups) {
    if (!has_axis(g, group, outer, g.view.size())) {
      continue;
    }
    ++vectors;
    if (has_axis(g, group, 0, outer)) {
      differs = true;
      int64_t own = 1;
      for (size_t axis = outer; axis < g.view.size(); ++axis) {
        own *= group.strides[axis] != 0 ? g.view[axis] : 1;
      }
      whole = whole && own == length;
    }
  }
  return !differs || (vectors == 1 && whole);
}

} // namespace

SM3Rows sm3_rows(const SM3Geometry& g) {
  using Kind = SM3Rows::Kind;
  if (g.groups.size() == 1 && g.groups[0].numel == g.numel) {
    return {Kind::kDiagonal, 0, g.numel};
  }
  SM3Rows best{Kind::kGeneral, 0, g.numel};
  int64_t length = 1;
  for (size_t outer = g.view.size(); outer-- > 1;) {
    length *= g.view[outer];
    if (length < kShort || length % g.aligned != 0 || !makes_rows(g, outer)) {
      continue;
    }
    best = {Kind::kRows, outer, length};
    if (length >= kLong) {
      break;
    }
  }
  return best;
}

} // namespace torch_sm3
