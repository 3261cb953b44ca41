// SPDX-License-Identifier: Apache-2.0
#include <sidecar_cuda.h>
#include <sidecar_kernel.cuh>

namespace torch_sm3::reversible {

cudaError_t launch_sidecar_encode(
    const SidecarEncode& s,
    int64_t tiles,
    int64_t* used,
    cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(tiles);
  for_width(s.width, [&]<class U>(U*) {
    sidecar_codes_kernel<U><<<blocks, kSidecarThreads, 0, stream>>>(s);
    sidecar_offsets_kernel<<<1, kSidecarThreads, 0, stream>>>(
        s.offsets, tiles, used);
    sidecar_escapes_kernel<U><<<blocks, kSidecarThreads, 0, stream>>>(s);
  });
  return cudaGetLastError();
}

cudaError_t launch_sidecar_decode(
    const SidecarDecode& s,
    int64_t tiles,
    cudaStream_t stream) {
  for_width(s.width, [&]<class U>(U*) {
    sidecar_decode_kernel<U>
        <<<static_cast<unsigned>(tiles), kSidecarThreads, 0, stream>>>(s);
  });
  return cudaGetLastError();
}

} // namespace torch_sm3::reversible
