// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What Adasum's CUDA kernels share.

#if defined(__CUDACC__)
#define TORCH_SM3_UNROLL_ALL _Pragma("unroll")
#define TORCH_SM3_UNROLL_SOME _Pragma("unroll (kUnroll)")
#else
#define TORCH_SM3_UNROLL_ALL
#define TORCH_SM3_UNROLL_SOME
#endif

namespace torch_sm3::distributed::cuda {

/// The largest of a block's values, in all its threads.
template <int kBlock>
__device__ __forceinline__ double largest_of_block(double value) {
  __shared__ double warps[kBlock / 32];
  for (int mask = 16; mask > 0; mask /= 2) {
    const double other = __shfl_xor_sync(~0u, value, mask);
    value = other > value ? other : value;
  }
  if (threadIdx.x % 32 == 0) {
    warps[threadIdx.x / 32] = value;
  }
  __syncthreads();
  for (int w = 0; w < kBlock / 32; ++w) {
    value = warps[w] > value ? warps[w] : value;
  }
  return value;
}

} // namespace torch_sm3::distributed::cuda
