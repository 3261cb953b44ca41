// SPDX-License-Identifier: Apache-2.0
#include <grid_cuda.h>
#include <grid_kernel.cuh>

namespace torch_sm3::reversible {
namespace {

struct Launch {
  const GridSum& sum;
  void* amax;
  int64_t count;
  cudaStream_t stream;

  unsigned blocks() const {
    constexpr int64_t kPerBlock = kGridThreads * kGridPerThread;
    return static_cast<unsigned>((count + kPerBlock - 1) / kPerBlock);
  }
};

template <class C, class V>
void launch_sum(const Launch& l) {
  const C* acc = static_cast<const C*>(l.sum.acc);
  const V* value = static_cast<const V*>(l.sum.value);
  C* out = static_cast<C*>(l.sum.out);
  C* amax = static_cast<C*>(l.amax);
  const Grid<C> grid = make_grid<C>(l.sum.bits);
  if (l.sum.op == GridOp::kSubtract) {
    grid_kernel<true, C, V><<<l.blocks(), kGridThreads, 0, l.stream>>>(
        acc, value, out, amax, l.count, grid);
  } else {
    grid_kernel<false, C, V><<<l.blocks(), kGridThreads, 0, l.stream>>>(
        acc, value, out, amax, l.count, grid);
  }
}

template <class C>
void launch_for(const Launch& l) {
  if (l.sum.op == GridOp::kQuantize) {
    quantize_kernel<C><<<l.blocks(), kGridThreads, 0, l.stream>>>(
        static_cast<const C*>(l.sum.value),
        static_cast<C*>(l.sum.out),
        l.count,
        make_grid<C>(l.sum.bits));
    return;
  }
  for_kind(l.sum.value_kind, [&]<class V>(V*) { launch_sum<C, V>(l); });
}

} // namespace

cudaError_t launch_grid(
    const GridSum& sum,
    void* amax,
    int64_t count,
    cudaStream_t stream) {
  const Launch launch{sum, amax, count, stream};
  if (sum.kind == ScalarKind::kFloat64) {
    launch_for<double>(launch);
  } else {
    launch_for<float>(launch);
  }
  return cudaGetLastError();
}

} // namespace torch_sm3::reversible
