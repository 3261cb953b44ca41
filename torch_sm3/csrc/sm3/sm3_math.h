// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The arithmetic of one element of SM3, once for every CPU instruction set and
/// for CUDA. Every operation is one IEEE rounding: that is what makes their
/// bits equal.

#include <scalar_math.h>

namespace torch_sm3 {

/// Which bound nu an element takes: see sm3.h. With `kGiven` the accumulators
/// are final already, the second phase of variant I.
enum class SM3Variant : int8_t { kII, kI, kGiven };

/// Hyper-parameters as the user gave them, and a preset's conventions.
struct SM3Hyperparameters {
  double lr = 0;
  double momentum = 0;
  double beta2 = 1; ///< 1 for the sum
  double eps = 0;   ///< under the root
  double weight_decay = 0;
  bool maximize = false;
  SM3Variant variant = SM3Variant::kII;
  double eps_outside = 0;   ///< added to the root
  bool zero_guard = false;  ///< no direction where nu is zero
  bool keep_larger = false; ///< accumulators never decrease
  bool rows_only = false;   ///< a sparse gradient sees one accumulator
  bool decay_first = false; ///< the decay is part of the direction
};

/// Hyper-parameters, each rounded to the computing type.
template <class C>
struct SM3Coefficients {
  C lr;
  C momentum;
  C one_minus_momentum; // of the unrounded momentum, rounded once
  C keep;               // factor of the old accumulator: 1, or beta2
  C add;                // factor of the squared gradient: 1, or 1 - beta2
  C eps;
  C eps_outside;
  C decay;       // 1 - lr * weight_decay, or 1
  C lr_decay;    // lr * weight_decay, or 0
  C first_decay; // weight_decay where it is part of the direction, else 0
  C scale;       // of the gradient; negative to maximize
  bool zero_guard;
  bool given;
};

/// \param lr         learning rate, which may come from a tensor
/// \param grad_scale what the loss was multiplied by; 1 without
template <class C>
TORCH_SM3_INLINE SM3Coefficients<C>
sm3_coefficients(const SM3Hyperparameters& h, double lr, double grad_scale) {
  SM3Coefficients<C> k;
  k.lr = static_cast<C>(lr);
  k.momentum = static_cast<C>(h.momentum);
  k.one_minus_momentum = static_cast<C>(1.0 - h.momentum);
  k.keep = static_cast<C>(h.beta2);
  k.add = h.beta2 < 1.0 ? static_cast<C>(1.0 - h.beta2) : C(1);
  k.eps = static_cast<C>(h.eps);
  k.eps_outside = static_cast<C>(h.eps_outside);
  const C weight_decay = static_cast<C>(h.weight_decay);
  k.lr_decay = h.decay_first ? C(0) : k.lr * weight_decay;
  k.decay = C(1) - k.lr_decay;
  k.first_decay = h.decay_first ? weight_decay : C(0);
  // As torch's GradScaler: one float32 factor, whatever the computing type.
  const C unscale = static_cast<C>(static_cast<float>(1.0 / grad_scale));
  k.scale = h.maximize ? -unscale : unscale;
  k.zero_guard = h.zero_guard;
  k.given = h.variant == SM3Variant::kGiven;
  return k;
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

/// g^2, saturated; zero where g is not finite, so that it enters no
/// accumulator.
template <class C>
TORCH_SM3_INLINE C sm3_square(C g) {
  const C clamped = sm3_clamp(g);
  return is_finite(g) ? clamped * clamped : C(0);
}

/// keep * old + add * square, saturated.
template <class C>
TORCH_SM3_INLINE C
sm3_accumulate(C old, C square, const SM3Coefficients<C>& k) {
  const C nu = k.keep * old + k.add * square;
  return nu < SM3Limits<C>::kMax ? nu : SM3Limits<C>::kMax;
}

/// The bound nu of one element.
///
/// \param g        scaled gradient
/// \param smallest least accumulator of the sets that hold the element
template <class C>
TORCH_SM3_INLINE C sm3_bound(C g, C smallest, const SM3Coefficients<C>& k) {
  const C nu = sm3_accumulate(smallest, sm3_square(g), k);
  return k.given ? smallest : nu;
}

/// The preconditioned gradient u = g / sqrt(nu + eps), with 0 / 0 = 0. It is
/// NaN where g is not finite, so that the fault is seen where it is.
template <class C>
TORCH_SM3_INLINE C sm3_direction(C g, C nu, const SM3Coefficients<C>& k) {
  const C inside = nu + k.eps;
  const C ratio = sm3_clamp(g) / (square_root(inside) + k.eps_outside);
  const bool none = inside == C(0) || (k.zero_guard && nu == C(0));
  const C direction = none ? C(0) : ratio;
  return is_finite(g) ? direction : static_cast<C>(__builtin_nanf(""));
}

/// The direction with weight decay in it, where the preset has it there.
template <class C>
TORCH_SM3_INLINE C sm3_first_decay(C u, C w, const SM3Coefficients<C>& k) {
  return k.first_decay == C(0) ? u : u + k.first_decay * w;
}

template <class C>
TORCH_SM3_INLINE C sm3_momentum(C m, C u, const SM3Coefficients<C>& k) {
  return k.momentum * m + k.one_minus_momentum * u;
}

template <class C>
TORCH_SM3_INLINE C sm3_weight(C w, C m, const SM3Coefficients<C>& k) {
  return k.decay * w - k.lr * m;
}

/// Adds an update to a 16-bit weight and keeps what rounding loses (Kahan).
template <class P>
TORCH_SM3_INLINE void sm3_compensated_weight(
    float m,
    const SM3Coefficients<float>& k,
    P* weight,
    P* compensation) {
  const float w = to_float(*weight);
  const float y = (-k.lr * m - k.lr_decay * w) + to_float(*compensation);
  round_to(w + y, weight);
  round_to(y - (to_float(*weight) - w), compensation);
}

// --- int8 momentum ----------------------------------------------------------

/// Elements along the last dimension that share one scale.
constexpr int64_t kSM3Block = 256;

/// `m` in steps of `scale`, to nearest even, or by a random number in [0, 1).
/// `random` is negative for the nearest.
TORCH_SM3_INLINE int8_t sm3_quantize(float m, float scale, float random) {
  const float q = m / scale;
  const float rounded = random < 0.0f ? rintf(q) : floorf(q + random);
  const float low = rounded < -127.0f ? -127.0f : rounded;
  const float bounded = low > 127.0f ? 127.0f : low;
  return scale == 0.0f || !is_finite(m) ? int8_t{0}
                                        : static_cast<int8_t>(bounded);
}

// --- random numbers ---------------------------------------------------------

/// A bijection of 64-bit numbers whose every output bit depends on every input
/// bit (the finaliser of SplitMix64).
TORCH_SM3_INLINE uint64_t sm3_mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

/// The key of one parameter in one step (counted from 1).
TORCH_SM3_INLINE uint64_t
sm3_random_key(uint64_t seed, uint64_t step, uint64_t ordinal) {
  return sm3_mix(sm3_mix(sm3_mix(seed) + step) + ordinal);
}

/// The random bits of one element: 0-15 for the weight, 16-31 for the momentum.
TORCH_SM3_INLINE uint32_t sm3_random(uint64_t key, uint64_t index) {
  const uint64_t bits = sm3_mix(key + 0x9E3779B97F4A7C15u * (index + 1));
  return static_cast<uint32_t>(bits);
}

/// The part of an element's random bits that rounds its momentum, in [0, 1).
TORCH_SM3_INLINE float sm3_momentum_random(uint32_t bits) {
  return static_cast<float>(bits >> 16) * 0x1p-16f;
}

/// Rounds up with the probability that the distance from below says.
TORCH_SM3_INLINE void
round_stochastic(float x, uint32_t random, BFloat16* out) {
  const uint32_t bits = float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t rounded = bits + (random & 0xffffu);
  const uint32_t kept = magnitude >= 0x7f800000u ? bits : rounded;
  const uint32_t upper = magnitude > 0x7f800000u ? 0x7fc0u : kept >> 16;
  out->bits = static_cast<uint16_t>(upper);
}

} // namespace torch_sm3
