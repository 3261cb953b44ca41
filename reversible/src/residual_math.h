// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Arithmetic of one element of a residual sum, once for host and device.

#include <cast_math.h>

namespace torch_sm3::reversible {

/// `acc + cast(value)` or `acc - cast(value)`, rounded once to A.
template <bool kSubtract, class A, class V>
TORCH_SM3_INLINE A residual(A acc, V value) {
  const auto x = widen(acc);
  const auto f = cast_as(value, static_cast<const A*>(nullptr));
  A result;
  round_to(kSubtract ? x - f : x + f, &result);
  return result;
}

} // namespace torch_sm3::reversible
