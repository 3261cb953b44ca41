// SPDX-License-Identifier: Apache-2.0
#include <checksum_cuda.h>
#include <checksum_kernel.cuh>

namespace torch_sm3::reversible {
namespace {

template <class U>
void launch(
    const Checksum& x,
    int64_t count,
    int64_t* sum,
    cudaStream_t stream) {
  const int64_t wanted = (count + kChecksumThreads - 1) / kChecksumThreads;
  const auto blocks = wanted < kChecksumBlocks ? static_cast<unsigned>(wanted)
                                               : kChecksumBlocks;
  checksum_kernel<U><<<blocks, kChecksumThreads, 0, stream>>>(
      static_cast<const U*>(x.data),
      count,
      reinterpret_cast<unsigned long long*>(sum));
}

} // namespace

cudaError_t launch_checksum(
    const Checksum& x,
    int64_t count,
    int64_t* sum,
    cudaStream_t stream) {
  switch (x.width) {
    case 1:
      launch<uint8_t>(x, count, sum, stream);
      break;
    case 2:
      launch<uint16_t>(x, count, sum, stream);
      break;
    case 4:
      launch<uint32_t>(x, count, sum, stream);
      break;
    default:
      launch<uint64_t>(x, count, sum, stream);
      break;
  }
  return cudaGetLastError();
}

} // namespace torch_sm3::reversible
