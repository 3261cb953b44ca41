// SPDX-License-Identifier: Apache-2.0
#include <grid_cuda.h>
#include <grid_layout.h>

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

namespace torch_sm3::reversible {
namespace {

// Call it under a guard of the tensors' device.
void run_cuda(const GridLayout& layout, void* amax) {
  if (layout.count > 0) {
    C10_CUDA_CHECK(launch_grid(
        layout.sum, amax, layout.count, c10::cuda::getCurrentCUDAStream()));
  }
}

at::Tensor quantize_cuda(const at::Tensor& x, int64_t bits) {
  check_quantize(x, bits);
  const c10::cuda::CUDAGuard guard(x.device());
  const GridLayout layout =
      grid_layout(GridOp::kQuantize, at::Tensor(), x, bits);
  run_cuda(layout, nullptr);
  return layout.out;
}

std::tuple<at::Tensor, at::Tensor>
add_cuda(const at::Tensor& acc, const at::Tensor& value, int64_t bits) {
  check_grid("reversible_grid_add", acc, value, bits);
  const c10::cuda::CUDAGuard guard(acc.device());
  const GridLayout layout = grid_layout(GridOp::kAdd, acc, value, bits);
  const at::Tensor amax = at::zeros({}, acc.options());
  run_cuda(layout, amax.mutable_data_ptr());
  return {layout.out, amax};
}

at::Tensor
sub_cuda(const at::Tensor& acc, const at::Tensor& value, int64_t bits) {
  check_grid("reversible_grid_sub", acc, value, bits);
  const c10::cuda::CUDAGuard guard(acc.device());
  const GridLayout layout = grid_layout(GridOp::kSubtract, acc, value, bits);
  run_cuda(layout, nullptr);
  return layout.out;
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, CUDA, m) {
  m.impl("reversible_quantize", &quantize_cuda);
  m.impl("reversible_grid_add", &add_cuda);
  m.impl("reversible_grid_sub", &sub_cuda);
}

} // namespace torch_sm3::reversible
