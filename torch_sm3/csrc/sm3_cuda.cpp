// SPDX-License-Identifier: Apache-2.0
#include <sm3_cuda.h>
#include <sm3_update.h>
#include <torch_sm3/check.h>

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>

namespace torch_sm3 {
namespace {

template <class C>
SM3DeviceTensor<C> device_tensor(const SM3Layout& layout) {
  SM3DeviceTensor<C> t{};
  t.param = layout.param;
  t.grad = layout.grad;
  t.momentum = layout.momentum;
  t.dims = static_cast<int>(layout.sizes.size());
  t.columns = layout.sizes.back();
  t.rows = std::accumulate(
      layout.sizes.begin(),
      layout.sizes.end() - 1,
      int64_t{1},
      std::multiplies<>());
  std::copy(layout.sizes.begin(), layout.sizes.end(), t.sizes);
  std::copy(
      layout.param_strides.begin(),
      layout.param_strides.end(),
      t.param_strides);
  std::copy(
      layout.grad_strides.begin(), layout.grad_strides.end(), t.grad_strides);
  std::copy(
      layout.momentum_strides.begin(),
      layout.momentum_strides.end(),
      t.momentum_strides);
  return t;
}

template <class C>
void update_item(const SM3Arguments& arguments, const SM3Item& item) {
  const SM3Layout layout = sm3_layout(arguments, item);
  SM3DeviceTensor<C> t = device_tensor<C>(layout);
  const auto k = sm3_coefficients<C>(arguments.hyperparameters);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const auto accumulator = [&](size_t i) {
    return arguments.accumulators[item.first_accumulator + i]
        .template mutable_data_ptr<C>();
  };
  if (layout.diagonal) {
    t.diagonal = accumulator(0);
    C10_CUDA_CHECK(
        launch_sm3_update(t, k, layout.param_kind, layout.grad_kind, stream));
    return;
  }
  // All blocks read the old numbers, so the new ones are gathered apart.
  const int64_t total =
      std::accumulate(layout.sizes.begin(), layout.sizes.end(), int64_t{0});
  const at::Tensor fresh = at::zeros(
      {total}, arguments.accumulators[item.first_accumulator].options());
  C* next = fresh.template mutable_data_ptr<C>();
  for (int d = 0; d < t.dims; ++d) {
    t.old_numbers[d] = accumulator(d);
    t.new_numbers[d] = next;
    next += t.sizes[d];
  }
  C10_CUDA_CHECK(
      launch_sm3_update(t, k, layout.param_kind, layout.grad_kind, stream));
  for (int d = 0; d < t.dims; ++d) {
    C10_CUDA_CHECK(cudaMemcpyAsync(
        accumulator(d),
        t.new_numbers[d],
        t.sizes[d] * sizeof(C),
        cudaMemcpyDeviceToDevice,
        stream));
  }
}

void sm3_update_cuda(
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
    TORCH_SM3_CHECK_VALUE(
        item.cover.dims.size() <= kSM3MaxDims,
        "sm3_update_",
        "params",
        c10::str("at most ", kSM3MaxDims, " dimensions on CUDA"),
        c10::str(item.cover.dims.size(), " at index ", item.index));
  }
  for (const SM3Item& item : items) {
    const at::Tensor& param = params[item.index];
    if (param.numel() > 0) {
      const c10::cuda::CUDAGuard guard(param.device());
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

TORCH_LIBRARY_IMPL(torch_sm3, CUDA, m) {
  m.impl("sm3_update_", &sm3_update_cuda);
}

} // namespace torch_sm3
