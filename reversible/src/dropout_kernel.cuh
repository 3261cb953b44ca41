// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Bodies of the CUDA kernels of dropout. Compiled by nvcc through
/// dropout_cuda.cu and, for tests, by the host compiler after
/// tests/cpp/cuda_on_host.h.

#include <dropout_math.h>

#include <cstdint>

namespace torch_sm3::reversible {

inline constexpr int kDropoutThreads = 256;

/// Elements whose words are consecutive; a thread takes those of one block of
/// words, so that its ten rounds serve four elements.
/// \param seed  one number, read when the kernel runs
/// \param start word of the first element
template <class T, class C>
__global__ void __launch_bounds__(kDropoutThreads) dropout_consecutive_kernel(
    const T* __restrict__ x,
    T* __restrict__ out,
    int64_t count,
    const int64_t* __restrict__ seed,
    uint64_t start,
    uint64_t threshold,
    C scale) {
  const uint64_t block = (start >> 2) +
                         static_cast<uint64_t>(blockIdx.x) * blockDim.x +
                         threadIdx.x;
  const PhiloxWords words = philox_block(block, static_cast<uint64_t>(*seed));
  for (unsigned w = 0; w < 4; ++w) {
    const auto i = static_cast<int64_t>(4 * block + w - start);
    if (i >= 0 && i < count) {
      out[i] = dropout(x[i], words.word[w], threshold, scale);
    }
  }
}

/// Elements whose words lie anywhere.
template <class T, class C>
__global__ void __launch_bounds__(kDropoutThreads) dropout_scattered_kernel(
    const T* __restrict__ x,
    T* __restrict__ out,
    int64_t count,
    const int64_t* __restrict__ seed,
    DropoutIndex index,
    uint64_t threshold,
    C scale) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) {
    const uint32_t word =
        philox_word(dropout_word(index, i), static_cast<uint64_t>(*seed));
    out[i] = dropout(x[i], word, threshold, scale);
  }
}

} // namespace torch_sm3::reversible
