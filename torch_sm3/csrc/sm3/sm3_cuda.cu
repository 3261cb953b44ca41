// SPDX-License-Identifier: Apache-2.0
#include <sm3_cuda.h>
#include <sm3_order.cuh>

namespace torch_sm3 {
namespace {

// Launches on one stream, for sm3_order.cuh.
struct OnStream {
  cudaStream_t stream;

  template <class... Parameters, class... Arguments>
  void operator()(
      int64_t blocks,
      void (*kernel)(Parameters...),
      const Arguments&... arguments) const {
    kernel<<<static_cast<unsigned>(blocks), kSM3Threads, 0, stream>>>(
        arguments...);
  }
};

} // namespace

void launch_sm3_dense(const SM3DenseLaunch<float>& step, cudaStream_t stream) {
  sm3_dense_step(step, OnStream{stream});
}

void launch_sm3_dense(const SM3DenseLaunch<double>& step, cudaStream_t stream) {
  sm3_dense_step(step, OnStream{stream});
}

void launch_sm3_maxima(const SM3DenseLaunch<float>& pass, cudaStream_t stream) {
  sm3_maxima_pass(pass, OnStream{stream});
}

void launch_sm3_maxima(
    const SM3DenseLaunch<double>& pass,
    cudaStream_t stream) {
  sm3_maxima_pass(pass, OnStream{stream});
}

void launch_sm3_sparse(
    const SM3SparseLaunch<float>& step,
    cudaStream_t stream) {
  sm3_sparse_step(step, OnStream{stream});
}

void launch_sm3_sparse(
    const SM3SparseLaunch<double>& step,
    cudaStream_t stream) {
  sm3_sparse_step(step, OnStream{stream});
}

void launch_sm3_nonfinite(const SM3NonfiniteLaunch& pass, cudaStream_t stream) {
  sm3_nonfinite_pass(pass, OnStream{stream});
}

} // namespace torch_sm3
