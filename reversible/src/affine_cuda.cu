// SPDX-License-Identifier: Apache-2.0
#include <affine_cuda.h>
#include <affine_kernel.cuh>

namespace torch_sm3::reversible {
namespace {

template <AffineOp kOp>
void launch(const Affine& affine, int64_t count, cudaStream_t stream) {
  constexpr int64_t kPerBlock = kAffineThreads * kAffinePerThread;
  const auto blocks =
      static_cast<unsigned>((count + kPerBlock - 1) / kPerBlock);
  if (affine.in_double) {
    affine_kernel<kOp, double>
        <<<blocks, kAffineThreads, 0, stream>>>(affine, count);
  } else {
    affine_kernel<kOp, float>
        <<<blocks, kAffineThreads, 0, stream>>>(affine, count);
  }
}

} // namespace

cudaError_t
launch_affine(const Affine& affine, int64_t count, cudaStream_t stream) {
  switch (affine.op) {
    case AffineOp::kForward:
      launch<AffineOp::kForward>(affine, count, stream);
      break;
    case AffineOp::kInverse:
      launch<AffineOp::kInverse>(affine, count, stream);
      break;
    case AffineOp::kBackward:
      launch<AffineOp::kBackward>(affine, count, stream);
      break;
  }
  return cudaGetLastError();
}

} // namespace torch_sm3::reversible
