// SPDX-License-Identifier: Apache-2.0
#include <sidecar_cuda.h>
#include <sidecar_layout.h>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

namespace torch_sm3::reversible {
namespace {

SidecarTensors encode_cuda(
    const at::Tensor& x,
    const at::Tensor& estimate,
    int64_t byte_capacity,
    int64_t wide_capacity) {
  check_sidecar_encode(x, estimate, byte_capacity, wide_capacity);
  const c10::cuda::CUDAGuard guard(x.device());
  const SidecarEncoding e =
      sidecar_encoding(x, estimate, byte_capacity, wide_capacity);
  if (e.tiles > 0) {
    C10_CUDA_CHECK(launch_sidecar_encode(
        e.sidecar,
        e.tiles,
        e.used.mutable_data_ptr<int64_t>(),
        c10::cuda::getCurrentCUDAStream()));
  } else {
    e.used.zero_();
  }
  return {e.codes, e.bytes, e.wide, e.offsets, e.used};
}

at::Tensor decode_cuda(
    const at::Tensor& estimate,
    const at::Tensor& codes,
    const at::Tensor& bytes,
    const at::Tensor& wide,
    const at::Tensor& offsets) {
  check_sidecar_decode(estimate, codes, bytes, wide, offsets);
  const c10::cuda::CUDAGuard guard(estimate.device());
  const SidecarDecoding d =
      sidecar_decoding(estimate, codes, bytes, wide, offsets);
  if (d.tiles > 0) {
    C10_CUDA_CHECK(launch_sidecar_decode(
        d.sidecar, d.tiles, c10::cuda::getCurrentCUDAStream()));
  }
  return d.x;
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, CUDA, m) {
  m.impl("reversible_sidecar_encode", &encode_cuda);
  m.impl("reversible_sidecar_decode", &decode_cuda);
}

} // namespace torch_sm3::reversible
