// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Random words of Philox-4x32-10 (Salmon et al., 2011) and dropout of one
/// element, once for host and device.

#include <cast_math.h>

namespace torch_sm3::reversible {

struct PhiloxWords {
  uint32_t word[4];
};

/// Ten rounds on counter words and key words, the lowest first.
TORCH_SM3_INLINE PhiloxWords
philox(PhiloxWords counter, uint32_t key0, uint32_t key1) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1];
  uint32_t c2 = counter.word[2], c3 = counter.word[3];
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xd2511f53u} * c0;
    const uint64_t b = uint64_t{0xcd9e8d57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(a);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Words 4 * block to 4 * block + 3 of the sequence that belongs to a seed.
TORCH_SM3_INLINE PhiloxWords philox_block(uint64_t block, uint64_t seed) {
  const PhiloxWords counter = {
      {static_cast<uint32_t>(block),
       static_cast<uint32_t>(block >> 32),
       0u,
       0u}};
  return philox(
      counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

/// Word n of the sequence.
TORCH_SM3_INLINE uint32_t philox_word(uint64_t n, uint64_t seed) {
  const PhiloxWords w = philox_block(n >> 2, seed);
  // Choices and no index, so that a loop of them can be vectors.
  const uint32_t even = (n & 2) == 0 ? w.word[0] : w.word[2];
  const uint32_t odd = (n & 2) == 0 ? w.word[1] : w.word[3];
  return (n & 1) == 0 ? even : odd;
}

inline constexpr int kDropoutDims = 12;

/// Which word of the random sequence belongs to an element: `start` plus its
/// index in each dimension times the dimension's stride, modulo 2^64.
/// Dimensions are in the order of memory and merged where they can be.
struct DropoutIndex {
  uint64_t start;
  int dims; ///< 1 or more
  int64_t sizes[kDropoutDims];
  int64_t strides[kDropoutDims];
};

/// The word that belongs to element i in the order of memory.
TORCH_SM3_INLINE uint64_t dropout_word(const DropoutIndex& index, int64_t i) {
  uint64_t n = index.start;
  for (int d = index.dims - 1; d >= 0; --d) {
    n += static_cast<uint64_t>(i % index.sizes[d]) *
         static_cast<uint64_t>(index.strides[d]);
    i /= index.sizes[d];
  }
  return n;
}

/// A word below the threshold, up to 2^32, drops its element.
template <class T, class C>
TORCH_SM3_INLINE T dropout(T x, uint32_t word, uint64_t threshold, C scale) {
  T result;
  round_to(
      word >= threshold ? static_cast<C>(widen(x)) * scale : C(0), &result);
  return result;
}

} // namespace torch_sm3::reversible
