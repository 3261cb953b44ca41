// SPDX-License-Identifier: Apache-2.0
#include <affine_cuda.h>
#include <affine_layout.h>

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

namespace torch_sm3::reversible {
namespace {

AffineLayout
run_cuda(AffineOp op, const std::array<at::Tensor, 3>& in, double clamp) {
  check_affine(op, in, clamp);
  const c10::cuda::CUDAGuard guard(in[0].device());
  AffineLayout layout = affine_layout(op, in, clamp);
  if (layout.count > 0) {
    C10_CUDA_CHECK(launch_affine(
        layout.affine, layout.count, c10::cuda::getCurrentCUDAStream()));
  }
  return layout;
}

at::Tensor forward_cuda(
    const at::Tensor& acc,
    const at::Tensor& scale,
    const at::Tensor& shift,
    double clamp) {
  return run_cuda(AffineOp::kForward, {acc, scale, shift}, clamp).out[0];
}

at::Tensor inverse_cuda(
    const at::Tensor& out,
    const at::Tensor& scale,
    const at::Tensor& shift,
    double clamp) {
  return run_cuda(AffineOp::kInverse, {out, scale, shift}, clamp).out[0];
}

std::tuple<at::Tensor, at::Tensor> backward_cuda(
    const at::Tensor& grad,
    const at::Tensor& acc,
    const at::Tensor& scale,
    double clamp) {
  const AffineLayout layout =
      run_cuda(AffineOp::kBackward, {grad, acc, scale}, clamp);
  return {layout.out[0], layout.out[1]};
}

} // namespace

TORCH_LIBRARY_IMPL(torch_sm3, CUDA, m) {
  m.impl("reversible_affine", &forward_cuda);
  m.impl("reversible_affine_inverse", &inverse_cuda);
  m.impl("reversible_affine_backward", &backward_cuda);
}

} // namespace torch_sm3::reversible
