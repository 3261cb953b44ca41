// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Arithmetic of one element of a residual sum, once for host and device.

#include <scalar_math.h>

namespace torch_sm3::reversible {

TORCH_SM3_INLINE double residual_cast(double x, const double*) {
  return x;
}
template <class V>
TORCH_SM3_INLINE double residual_cast(V x, const double*) {
  return to_double(x);
}

/// float64 goes to 16 bits through float32, as `Tensor.to` does it.
TORCH_SM3_INLINE float residual_narrow(double x) {
  return static_cast<float>(x);
}
template <class V>
TORCH_SM3_INLINE float residual_narrow(V x) {
  return to_float(x);
}

/// Casts to the accumulator's type A; the result is widened again, exactly.
template <class V, class A>
TORCH_SM3_INLINE float residual_cast(V x, const A*) {
  A cast;
  round_to(residual_narrow(x), &cast);
  return to_float(cast);
}

TORCH_SM3_INLINE double residual_widen(double x) {
  return x;
}
template <class A>
TORCH_SM3_INLINE float residual_widen(A x) {
  return to_float(x);
}

/// `acc + cast(value)` or `acc - cast(value)`, rounded once to A.
template <bool kSubtract, class A, class V>
TORCH_SM3_INLINE A residual(A acc, V value) {
  const auto x = residual_widen(acc);
  const auto f = residual_cast(value, static_cast<const A*>(nullptr));
  A result;
  round_to(kSubtract ? x - f : x + f, &result);
  return result;
}

/// Calls `body(T*)`, a null pointer whose type says what `kind` means.
template <class Body>
static inline auto residual_for_kind(ScalarKind kind, Body body) {
  switch (kind) {
    case ScalarKind::kFloat64:
      return body(static_cast<double*>(nullptr));
    case ScalarKind::kFloat16:
      return body(static_cast<Half*>(nullptr));
    case ScalarKind::kBFloat16:
      return body(static_cast<BFloat16*>(nullptr));
    default:
      return body(static_cast<float*>(nullptr));
  }
}

} // namespace torch_sm3::reversible
