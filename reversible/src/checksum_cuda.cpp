// SPDX-License-Identifier: Apache-2.0
#include <checksum_cuda.h>
#include <checksum_layout.h>

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

namespace torch_sm3::reversible {
namespace {

at::Tensor checksum_cuda(const at::Tensor& x) {
  check_checksum(x);
  const c10::cuda::CUDAGuard guard(x.device());
  const ChecksumLayout layout = checksum_layout(x);
  const at::Tensor sum = at::zeros({}, x.options().dtype(at::kLong));
  const int64_t count = layout.elements.numel();
  if (count > 0) {
    C10_CUDA_CHECK(launch_checksum(
        layout.checksum,
        count,
        sum.mutable_data_ptr<int64_t>(),
        c10::cuda::getCurrentCUDAStream()));
  }
  return sum;
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, CUDA, m) {
  m.impl("reversible_checksum", &checksum_cuda);
}

} // namespace torch_sm3::reversible
