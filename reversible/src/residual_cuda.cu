// SPDX-License-Identifier: Apache-2.0
#include <residual_cuda.h>
#include <residual_kernel.cuh>

namespace torch_sm3::reversible {
namespace {

template <class A, class V>
cudaError_t launch(const Residual& r, int64_t count, cudaStream_t stream) {
  constexpr int64_t kPerBlock = kResidualThreads * kResidualPerThread;
  const auto blocks =
      static_cast<unsigned>((count + kPerBlock - 1) / kPerBlock);
  const A* acc = static_cast<const A*>(r.acc);
  const V* value = static_cast<const V*>(r.value);
  A* out = static_cast<A*>(r.out);
  if (r.subtract) {
    residual_kernel<true, A, V>
        <<<blocks, kResidualThreads, 0, stream>>>(acc, value, out, count);
  } else {
    residual_kernel<false, A, V>
        <<<blocks, kResidualThreads, 0, stream>>>(acc, value, out, count);
  }
  return cudaGetLastError();
}

template <class A>
cudaError_t
launch_for_acc(const Residual& r, int64_t count, cudaStream_t stream) {
  switch (r.value_kind) {
    case ScalarKind::kFloat64:
      return launch<A, double>(r, count, stream);
    case ScalarKind::kFloat16:
      return launch<A, Half>(r, count, stream);
    case ScalarKind::kBFloat16:
      return launch<A, BFloat16>(r, count, stream);
    default:
      return launch<A, float>(r, count, stream);
  }
}

} // namespace

cudaError_t
launch_residual(const Residual& residual, int64_t count, cudaStream_t stream) {
  switch (residual.acc_kind) {
    case ScalarKind::kFloat64:
      return launch_for_acc<double>(residual, count, stream);
    case ScalarKind::kFloat16:
      return launch_for_acc<Half>(residual, count, stream);
    case ScalarKind::kBFloat16:
      return launch_for_acc<BFloat16>(residual, count, stream);
    default:
      return launch_for_acc<float>(residual, count, stream);
  }
}

} // namespace torch_sm3::reversible
