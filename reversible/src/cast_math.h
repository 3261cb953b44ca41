// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Casts between the element types of a stream and of what is added to it.

#include <scalar_math.h>

namespace torch_sm3::reversible {

TORCH_SM3_INLINE double cast_as(double x, const double*) {
  return x;
}
template <class V>
TORCH_SM3_INLINE double cast_as(V x, const double*) {
  return to_double(x);
}

/// float64 goes to 16 bits through float32, as `Tensor.to` does it.
TORCH_SM3_INLINE float narrow(double x) {
  return static_cast<float>(x);
}
template <class V>
TORCH_SM3_INLINE float narrow(V x) {
  return to_float(x);
}

/// Casts to the type A of the stream; the result is widened again, exactly.
template <class V, class A>
TORCH_SM3_INLINE float cast_as(V x, const A*) {
  A cast;
  round_to(narrow(x), &cast);
  return to_float(cast);
}

/// To the type of arithmetic, exactly.
TORCH_SM3_INLINE double widen(double x) {
  return x;
}
template <class A>
TORCH_SM3_INLINE float widen(A x) {
  return to_float(x);
}

/// Calls `body(T*)`, a null pointer whose type says what `kind` means.
template <class Body>
static inline auto for_kind(ScalarKind kind, Body body) {
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
