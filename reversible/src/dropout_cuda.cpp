// SPDX-License-Identifier: Apache-2.0
#include <dropout_cuda.h>
#include <dropout_layout.h>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

namespace torch_sm3::reversible {
namespace {

at::Tensor dropout_cuda(
    const at::Tensor& x,
    double p,
    const at::Tensor& seed,
    int64_t offset,
    at::OptionalIntArrayRef strides) {
  check_dropout(x, p, seed, offset, as_symbols(strides));
  const c10::cuda::CUDAGuard guard(x.device());
  const DropoutLayout layout = dropout_layout(x, p, offset, strides);
  if (layout.count > 0) {
    C10_CUDA_CHECK(launch_dropout(
        layout.dropout,
        seed.const_data_ptr<int64_t>(),
        layout.count,
        c10::cuda::getCurrentCUDAStream()));
  }
  return layout.out;
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, CUDA, m) {
  m.impl("reversible_dropout", &dropout_cuda);
}

} // namespace torch_sm3::reversible
