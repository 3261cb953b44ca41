// SPDX-License-Identifier: Apache-2.0
#include "adasum_compute_coefficients.h"
#include "adasum_compute.h"
#include "adasum_cpu_tiles.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <vector>

namespace torch_sm3::distributed {
namespace {

std::vector<int64_t> nodes_of(const Rule& rule, int64_t p) {
  if (!rule.nodes.empty() || rule.node_size == 0) {
    return rule.nodes;
  }
  std::vector<int64_t> nodes;
  for (int64_t first = 0; first < p; first += rule.node_size) {
    nodes.push_back(std::min(rule.node_size, p - first));
  }
  return nodes;
}

// A list on the device of the Gram matrix; undefined if it is empty. Pinned,
// because a copy from pageable memory would make the host wait.
template <class T>
at::Tensor
upload(const std::vector<T>& values, const at::TensorOptions& options) {
  if (values.empty()) {
    return {};
  }
  const at::Tensor host = at::empty(
      {static_cast<int64_t>(values.size())},
      options.device(at::kCPU).pinned_memory(options.device().is_cuda()));
  std::copy(values.begin(), values.end(), host.mutable_data_ptr<T>());
  return host.to(options.device(), /*non_blocking=*/true);
}

template <class T>
const T* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<T>() : nullptr;
}

} // namespace

void coefficients_cpu(const LayerTable& table) {
  // One entry of a Gram matrix costs as much as some elements of a leaf.
  const int64_t work = table.layers * table.rule.p * table.rule.p * 4;
  in_parallel(table.layers, work, [&](int64_t first, int64_t last) {
    for (int64_t layer = first; layer < last; ++layer) {
      coefficients_of_layer(table, layer);
    }
  });
}

Coefficients coefficients_of_layers(
    const at::Tensor& gram,
    const Rule& rule,
    const at::Tensor& means,
    const at::Tensor& shifts,
    const at::Tensor& states) {
  const c10::DeviceGuard guard(gram.device());
  const int64_t layers = gram.size(0);
  const int64_t p = gram.size(1);
  const auto options = gram.options();
  const at::Tensor weights = upload(rule.weights, options);
  const at::Tensor nodes = upload(nodes_of(rule, p), options.dtype(at::kLong));
  const int64_t count = nodes.defined() ? nodes.numel() : 0;
  const at::Tensor numbers =
      at::empty({layers, layer_scratch(p, count)}, options);
  const at::Tensor integers =
      at::empty({layers, layer_integers(p, count)}, options.dtype(at::kInt));
  Coefficients result{
      at::empty({layers, p}, options),
      at::empty({layers, 2}, options),
      at::empty({layers, 3}, options)};
  const LayerTable table{
      {p,
       rule.mode,
       rule.scale,
       data_or_null<double>(weights),
       data_or_null<int64_t>(nodes),
       count,
       rule.inner},
      layers,
      gram.const_data_ptr<double>(),
      data_or_null<int32_t>(shifts),
      reinterpret_cast<const NodeState*>(data_or_null<double>(states)),
      data_or_null<bool>(means),
      numbers.mutable_data_ptr<double>(),
      integers.mutable_data_ptr<int32_t>(),
      result.values.mutable_data_ptr<double>(),
      result.report.mutable_data_ptr<double>(),
      reinterpret_cast<NodeState*>(result.roots.mutable_data_ptr<double>())};
#ifdef TORCH_SM3_WITH_CUDA
  if (gram.is_cuda()) {
    coefficients_cuda(table);
    return result;
  }
#endif
  coefficients_cpu(table);
  return result;
}

} // namespace torch_sm3::distributed
