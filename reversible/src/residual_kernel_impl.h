// SPDX-License-Identifier: Apache-2.0

/// \file
/// Body of the CPU kernel; included by
/// residual_kernel_{scalar,avx2,avx512}.cpp, which define TORCH_SM3_RESIDUAL,
/// the name of the function.

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

#define TORCH_SM3_PASTE_(a, b) a##b
#define TORCH_SM3_PASTE(a, b) TORCH_SM3_PASTE_(a, b)

void TORCH_SM3_PASTE(
    residual_,
    TORCH_SM3_ISA)(const Residual& residual, int64_t begin, int64_t end) {
  residual_for_kind(residual.acc_kind, [&]<class A>(A*) {
    residual_for_kind(residual.value_kind, [&]<class V>(V*) {
      if (residual.subtract) {
        residual_range<true, A, V>(residual, begin, end);
      } else {
        residual_range<false, A, V>(residual, begin, end);
      }
    });
  });
}

} // namespace torch_sm3::reversible
