// SPDX-License-Identifier: Apache-2.0

/// \file
/// Body of the CPU kernel; included by
/// residual_kernel_{scalar,avx2,avx512}.cpp, which define TORCH_SM3_ISA, the
/// end of the function's name.

#include <instruction_sets.h>
#include <residual_kernel.h>
#include <residual_math.h>

namespace torch_sm3::reversible {
namespace {

template <bool kSubtract, class A, class V>
void residual_range(const Residual& residual, int64_t begin, int64_t end) {
  const A* __restrict__ acc = static_cast<const A*>(residual.acc);
  const V* __restrict__ value = static_cast<const V*>(residual.value);
  A* __restrict__ out = static_cast<A*>(residual.out);
  for (int64_t i = begin; i < end; ++i) {
    out[i] = reversible::residual<kSubtract>(acc[i], value[i]);
  }
}

} // namespace

void TORCH_SM3_FOR_ISA(
    residual)(const Residual& residual, int64_t begin, int64_t end) {
  for_kind(residual.acc_kind, [&]<class A>(A*) {
    for_kind(residual.value_kind, [&]<class V>(V*) {
      if (residual.subtract) {
        residual_range<true, A, V>(residual, begin, end);
      } else {
        residual_range<false, A, V>(residual, begin, end);
      }
    });
  });
}

} // namespace torch_sm3::reversible
