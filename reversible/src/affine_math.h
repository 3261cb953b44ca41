// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Arithmetic of one element of an affine coupling, once for host and device.
/// C is the type of arithmetic: double for float64 accumulators, else float.

#include <cast_math.h>
#include <exp_tanh_math.h>

namespace torch_sm3::reversible {

/// The logarithm of the scale, s = clamp * tanh(raw / clamp), and ds / draw.
template <class C>
struct LogScale {
  C value;
  C slope;
};
template <class C>
TORCH_SM3_INLINE LogScale<C> log_scale(C raw, C clamp) {
  const Tanh<C> t = tanh_with_slope(raw / clamp);
  return {clamp * t.value, t.slope};
}

template <class C>
TORCH_SM3_INLINE C affine(C acc, C scale, C shift, C clamp) {
  return acc * exponential(log_scale(scale, clamp).value) + shift;
}

template <class C>
TORCH_SM3_INLINE C affine_inverse(C out, C scale, C shift, C clamp) {
  return (out - shift) * exponential(-log_scale(scale, clamp).value);
}

/// Gradients of `affine`: of acc, and of the scale as it came.
template <class C>
struct AffineGrads {
  C acc;
  C scale;
};
template <class C>
TORCH_SM3_INLINE AffineGrads<C>
affine_backward(C grad, C acc, C scale, C clamp) {
  const LogScale<C> s = log_scale(scale, clamp);
  const C of_acc = grad * exponential(s.value);
  return {of_acc, of_acc * acc * s.slope};
}

} // namespace torch_sm3::reversible
