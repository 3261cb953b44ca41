// SPDX-License-Identifier: Apache-2.0

/// \file
/// Body of the CPU kernel; included by dropout_kernel_{scalar,avx2,avx512}.cpp,
/// which define TORCH_SM3_ISA, the end of the function's name.

#include <dropout_kernel.h>
#include <instruction_sets.h>

#include <algorithm>

namespace torch_sm3::reversible {
namespace {

// Elements whose words are made together, in the first cache.
constexpr int64_t kChunk = 512;

// A block at the front and one at the end may be there for a part only.
using Words = uint32_t[kChunk + 8];

// Words n to n + size - 1; returns the first.
const uint32_t*
consecutive(uint64_t n, int64_t size, uint64_t seed, Words words) {
  const int64_t lead = static_cast<int64_t>(n & 3);
  const int64_t blocks = (lead + size + 3) / 4;
  for (int64_t k = 0; k < blocks; ++k) {
    const PhiloxWords w =
        philox_block((n >> 2) + static_cast<uint64_t>(k), seed);
    for (int64_t j = 0; j < 4; ++j) {
      words[4 * k + j] = w.word[j];
    }
  }
  return words + lead;
}

// Words n, n + stride, ...
const uint32_t* scattered(
    uint64_t n,
    int64_t stride,
    int64_t size,
    uint64_t seed,
    Words words) {
  for (int64_t i = 0; i < size; ++i) {
    words[i] = philox_word(
        n + static_cast<uint64_t>(i) * static_cast<uint64_t>(stride), seed);
  }
  return words;
}

template <class T>
void dropout_range(
    const Dropout& d,
    uint64_t seed,
    int64_t begin,
    int64_t end) {
  using C = decltype(widen(T()));
  const T* __restrict__ x = static_cast<const T*>(d.x);
  T* __restrict__ out = static_cast<T*>(d.out);
  const C scale = static_cast<C>(d.scale);
  const int64_t row = d.index.sizes[d.index.dims - 1];
  const int64_t stride = d.index.strides[d.index.dims - 1];
  Words buffer;
  for (int64_t first = begin; first < end;) {
    const int64_t left_of_row = row - first % row;
    const int64_t size = std::min({kChunk, end - first, left_of_row});
    const uint64_t n = dropout_word(d.index, first);
    const uint32_t* words = stride == 1
                                ? consecutive(n, size, seed, buffer)
                                : scattered(n, stride, size, seed, buffer);
    for (int64_t i = 0; i < size; ++i) {
      out[first + i] = dropout(x[first + i], words[i], d.threshold, scale);
    }
    first += size;
  }
}

} // namespace

void TORCH_SM3_FOR_ISA(
    dropout)(const Dropout& d, uint64_t seed, int64_t begin, int64_t end) {
  for_kind(d.kind, [&]<class T>(T*) { dropout_range<T>(d, seed, begin, end); });
}

} // namespace torch_sm3::reversible
