// SPDX-License-Identifier: Apache-2.0
#include <sm3_cuda.h>
#include <sm3_kernel.cuh>

namespace torch_sm3 {
namespace {

template <class C, class P, class G>
cudaError_t launch(
    const SM3DeviceTensor<C>& t,
    const SM3Coefficients<C>& k,
    cudaStream_t stream) {
  if (t.diagonal != nullptr) {
    const int64_t blocks = (t.rows * t.columns + kSM3Threads - 1) / kSM3Threads;
    sm3_diagonal_kernel<C, P, G>
        <<<static_cast<unsigned>(blocks), kSM3Threads, 0, stream>>>(t, k);
  } else {
    const int64_t blocks = (t.columns + kSM3Threads - 1) / kSM3Threads *
                           ((t.rows + kSM3Rows - 1) / kSM3Rows);
    sm3_rows_kernel<C, P, G>
        <<<static_cast<unsigned>(blocks), kSM3Threads, 0, stream>>>(t, k);
  }
  return cudaGetLastError();
}

template <class C, class P>
cudaError_t launch_for_param(
    const SM3DeviceTensor<C>& t,
    const SM3Coefficients<C>& k,
    ScalarKind grad_kind,
    cudaStream_t stream) {
  switch (grad_kind) {
    case ScalarKind::kFloat16:
      return launch<C, P, Half>(t, k, stream);
    case ScalarKind::kBFloat16:
      return launch<C, P, BFloat16>(t, k, stream);
    case ScalarKind::kFloat64:
      if constexpr (sizeof(C) == sizeof(double)) {
        return launch<C, P, double>(t, k, stream);
      }
      return cudaErrorInvalidValue;
    default:
      return launch<C, P, float>(t, k, stream);
  }
}

} // namespace

cudaError_t launch_sm3_update(
    const SM3DeviceTensor<float>& tensor,
    const SM3Coefficients<float>& coefficients,
    ScalarKind param_kind,
    ScalarKind grad_kind,
    cudaStream_t stream) {
  switch (param_kind) {
    case ScalarKind::kFloat16:
      return launch_for_param<float, Half>(
          tensor, coefficients, grad_kind, stream);
    case ScalarKind::kBFloat16:
      return launch_for_param<float, BFloat16>(
          tensor, coefficients, grad_kind, stream);
    default:
      return launch_for_param<float, float>(
          tensor, coefficients, grad_kind, stream);
  }
}

cudaError_t launch_sm3_update(
    const SM3DeviceTensor<double>& tensor,
    const SM3Coefficients<double>& coefficients,
    ScalarKind,
    ScalarKind grad_kind,
    cudaStream_t stream) {
  return launch_for_param<double, double>(
      tensor, coefficients, grad_kind, stream);
}

} // namespace torch_sm3
