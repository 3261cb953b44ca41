// SPDX-License-Identifier: Apache-2.0

/// \file
/// Bodies of the CPU kernels; included by grid_kernel_{scalar,avx2,avx512}.cpp,
/// which define TORCH_SM3_ISA, the end of the functions' names.

#include <grid_kernel.h>
#include <grid_math.h>
#include <instruction_sets.h>

namespace torch_sm3::reversible {
namespace {

template <class C>
void quantize_range(const GridSum& sum, int64_t begin, int64_t end) {
  const C* __restrict__ value = static_cast<const C*>(sum.value);
  C* __restrict__ out = static_cast<C*>(sum.out);
  const Grid<C> grid = make_grid<C>(sum.bits);
  for (int64_t i = begin; i < end; ++i) {
    out[i] = quantize(value[i], grid);
  }
}

template <bool kSubtract, class C, class V>
int64_t sum_range(const GridSum& sum, int64_t begin, int64_t end) {
  const C* __restrict__ acc = static_cast<const C*>(sum.acc);
  const V* __restrict__ value = static_cast<const V*>(sum.value);
  C* __restrict__ out = static_cast<C*>(sum.out);
  const Grid<C> grid = make_grid<C>(sum.bits);
  typename GridTraits<C>::Bits largest = 0;
  for (int64_t i = begin; i < end; ++i) {
    const C y = grid_sum<kSubtract>(acc[i], value[i], grid);
    out[i] = y;
    if (!kSubtract) {
      const auto magnitude = magnitude_bits(y);
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  return largest;
}

template <class C>
int64_t grid_range(const GridSum& sum, int64_t begin, int64_t end) {
  if (sum.op == GridOp::kQuantize) {
    quantize_range<C>(sum, begin, end);
    return 0;
  }
  return for_kind(sum.value_kind, [&]<class V>(V*) {
    return sum.op == GridOp::kAdd ? sum_range<false, C, V>(sum, begin, end)
                                  : sum_range<true, C, V>(sum, begin, end);
  });
}

} // namespace

int64_t
TORCH_SM3_FOR_ISA(grid)(const GridSum& sum, int64_t begin, int64_t end) {
  return sum.kind == ScalarKind::kFloat64 ? grid_range<double>(sum, begin, end)
                                          : grid_range<float>(sum, begin, end);
}

} // namespace torch_sm3::reversible
