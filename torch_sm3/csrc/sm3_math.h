// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The arithmetic of one element of SM3-II, once for every CPU instruction set
/// and for CUDA. Every operation is one IEEE rounding: that is what makes their
/// bits equal.

#include <scalar_math.h>

#include <cmath>

namespace torch_sm3 {

/// Hyper-parameters, each rounded to the computing type.
template <class C>
struct SM3Coefficients {
  C lr;
  C momentum;
  C one_minus_momentum; // of the unrounded momentum, rounded once
  C keep;               // factor of the old accumulator: 1, or beta2
  C add;                // factor of the squared gradient: 1, or 1 - beta2
  C eps;
  C decay; // 1 - lr * weight_decay
  C sign;  // -1 to maximize
};

/// Hyper-parameters as the user gave them.
struct SM3Hyperparameters {
  double lr;
  double momentum;
  double beta2; // 1 for the sum
  double eps;
  double weight_decay;
  bool maximize;
};

template <class C>
TORCH_SM3_INLINE SM3Coefficients<C>
sm3_coefficients(const SM3Hyperparameters& h) {
  SM3Coefficients<C> k;
  k.lr = static_cast<C>(h.lr);
  k.momentum = static_cast<C>(h.momentum);
  k.one_minus_momentum = static_cast<C>(1.0 - h.momentum);
  k.keep = static_cast<C>(h.beta2);
  k.add = h.beta2 < 1.0 ? static_cast<C>(1.0 - h.beta2) : C(1);
  k.eps = static_cast<C>(h.eps);
  k.decay = C(1) - k.lr * static_cast<C>(h.weight_decay);
  k.sign = h.maximize ? C(-1) : C(1);
  return k;
}

TORCH_SM3_INLINE float square_root(float x) {
  return sqrtf(x);
}
TORCH_SM3_INLINE double square_root(double x) {
  return sqrt(x);
}

/// Bounds of a computing type: its largest number, and that number's root.
template <class C>
struct SM3Limits;
template <>
struct SM3Limits<float> {
  static constexpr float kMax = 3.402823466e+38f;
  static constexpr float kRootMax = 1.844674297e+19f;
};
template <>
struct SM3Limits<double> {
  static constexpr double kMax = 1.7976931348623157e+308;
  static constexpr double kRootMax = 1.3407807929942596e+154;
};

/// True unless `x` is infinite or NaN.
template <class C>
TORCH_SM3_INLINE bool is_finite(C x) {
  return (x < C(0) ? -x : x) <= SM3Limits<C>::kMax;
}

/// Limits |g|, so that neither its square nor a ratio can overflow.
template <class C>
TORCH_SM3_INLINE C sm3_clamp(C g) {
  const C low = g < -SM3Limits<C>::kRootMax ? -SM3Limits<C>::kRootMax : g;
  return low > SM3Limits<C>::kRootMax ? SM3Limits<C>::kRootMax : low;
}

/// The new bound nu of one element; a non-finite gradient adds nothing to it.
///
/// \param g        gradient
/// \param smallest least accumulator of the sets that hold the element
template <class C>
TORCH_SM3_INLINE C sm3_bound(C g, C smallest, const SM3Coefficients<C>& k) {
  const C clamped = sm3_clamp(g);
  const C square = is_finite(g) ? clamped * clamped : C(0);
  const C nu = k.keep * smallest + k.add * square;
  return nu < SM3Limits<C>::kMax ? nu : SM3Limits<C>::kMax;
}

/// The preconditioned gradient u = g / sqrt(nu + eps), with 0 / 0 = 0. It is
/// NaN where g is not finite, so that the fault is seen where it is.
template <class C>
TORCH_SM3_INLINE C sm3_direction(C g, C nu, const SM3Coefficients<C>& k) {
  const C denominator = nu + k.eps;
  const C ratio = sm3_clamp(g) / square_root(denominator);
  const C direction = denominator == C(0) ? C(0) : ratio;
  return is_finite(g) ? direction : static_cast<C>(__builtin_nanf(""));
}

template <class C>
TORCH_SM3_INLINE C sm3_momentum(C m, C u, const SM3Coefficients<C>& k) {
  return k.momentum * m + k.one_minus_momentum * u;
}

template <class C>
TORCH_SM3_INLINE C sm3_weight(C w, C m, const SM3Coefficients<C>& k) {
  return k.decay * w - k.lr * m;
}

} // namespace torch_sm3
