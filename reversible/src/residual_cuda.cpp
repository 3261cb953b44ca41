// SPDX-License-Identifier: Apache-2.0
#include <residual_cuda.h>
#include <residual_layout.h>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

namespace torch_sm3::reversible {
namespace {

at::Tensor
residual_cuda(const at::Tensor& acc, const at::Tensor& value, bool subtract) {
  const c10::cuda::CUDAGuard guard(acc.device());
  const ResidualLayout layout = residual_layout(acc, value, subtract);
  if (layout.count > 0) {
    C10_CUDA_CHECK(launch_residual(
        layout.residual, layout.count, c10::cuda::getCurrentCUDAStream()));
  }
  return layout.out;
}

at::Tensor add_cuda(const at::Tensor& acc, const at::Tensor& value) {
  check_residual("reversible_add", acc, value);
  return residual_cuda(acc, value, false);
}

at::Tensor sub_cuda(const at::Tensor& acc, const at::Tensor& value) {
  check_residual("reversible_sub", acc, value);
  return residual_cuda(acc, value, true);
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, CUDA, m) {
  m.impl("reversible_add", &add_cuda);
  m.impl("reversible_sub", &sub_cuda);
}

} // namespace torch_sm3::reversible
