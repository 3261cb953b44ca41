// SPDX-License-Identifier: Apache-2.0
#include <dropout_cuda.h>
#include <dropout_kernel.cuh>

namespace torch_sm3::reversible {
namespace {

template <class T>
void launch(
    const Dropout& d,
    const int64_t* seed,
    int64_t count,
    cudaStream_t stream) {
  using C = decltype(widen(T()));
  const T* x = static_cast<const T*>(d.x);
  T* out = static_cast<T*>(d.out);
  const C scale = static_cast<C>(d.scale);
  const auto blocks = [](int64_t threads) {
    return static_cast<unsigned>(
        (threads + kDropoutThreads - 1) / kDropoutThreads);
  };
  if (d.index.dims == 1 && d.index.strides[0] == 1) {
    const uint64_t start = d.index.start;
    const auto lead = static_cast<int64_t>(start & 3);
    dropout_consecutive_kernel<T, C>
        <<<blocks((lead + count + 3) / 4), kDropoutThreads, 0, stream>>>(
            x, out, count, seed, start, d.threshold, scale);
  } else {
    dropout_scattered_kernel<T, C>
        <<<blocks(count), kDropoutThreads, 0, stream>>>(
            x, out, count, seed, d.index, d.threshold, scale);
  }
}

} // namespace

cudaError_t launch_dropout(
    const Dropout& d,
    const int64_t* seed,
    int64_t count,
    cudaStream_t stream) {
  for_kind(d.kind, [&]<class T>(T*) { launch<T>(d, seed, count, stream); });
  return cudaGetLastError();
}

} // namespace torch_sm3::reversible
