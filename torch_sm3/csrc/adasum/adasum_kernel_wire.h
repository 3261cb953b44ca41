// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Largest magnitudes and products with a power of two, for the 16-bit format
/// of the wire and for leaves at the ends of float64; and the hash of results.
/// Included by adasum_kernel_impl.h only.

#include "adasum_kernel_round.h"
#include "adasum_scales.h"

#include <type_traits>

namespace torch_sm3::distributed::TORCH_SM3_ISA {

/// Bits of an element: unsigned integer, those of +infinity.
template <class T>
struct BitsOf;
template <>
struct BitsOf<float> {
  using Type = uint32_t;
  static constexpr Type kInfinity = 0x7f800000u;
};
template <>
struct BitsOf<double> {
  using Type = uint64_t;
  static constexpr Type kInfinity = 0x7ff0000000000000u;
};
template <>
struct BitsOf<Half> {
  using Type = uint16_t;
  static constexpr Type kInfinity = 0x7c00u;
};
template <>
struct BitsOf<BFloat16> {
  using Type = uint16_t;
  static constexpr Type kInfinity = 0x7f80u;
};

// Magnitudes are in the order of their bits. Lanes of their own, so that the
// compiler takes registers of them.
template <class T>
static Largest largest_of(const T* in, int64_t size) {
  using Bits = typename BitsOf<T>::Type;
  constexpr Bits kInfinity = BitsOf<T>::kInfinity;
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  constexpr int kCount = kVectorBytes / static_cast<int>(sizeof(T));
  using Vector = VectorOf<Bits, kCount>;
  Vector any = {}, finite = {};
  const auto look = [&](Vector bits) {
    bits &= kMagnitude;
    const Vector kept = bits < kInfinity ? bits : Vector{};
    any = bits > any ? bits : any;
    finite = kept > finite ? kept : finite;
  };
  const int64_t whole = size - size % kCount;
  for (int64_t e = 0; e < whole; e += kCount) {
    fetch<kCount>(in + e);
    look(read<Vector>(in + e));
  }
  T rest[kCount] = {};
  __builtin_memcpy(rest, in + whole, (size - whole) * sizeof(T));
  look(read<Vector>(rest));
  Bits most = 0, most_finite = 0;
  for (int k = 0; k < kCount; ++k) {
    most = any[k] > most ? any[k] : most;
    most_finite = finite[k] > most_finite ? finite[k] : most_finite;
  }
  T value;
  __builtin_memcpy(&value, &most_finite, sizeof(value));
  return {to_double(value), most < kInfinity};
}

static Largest largest(const void* in, ScalarKind kind, int64_t size) {
  switch (kind) {
    case ScalarKind::kFloat64:
      return largest_of(static_cast<const double*>(in), size);
    case ScalarKind::kFloat16:
      return largest_of(static_cast<const Half*>(in), size);
    case ScalarKind::kBFloat16:
      return largest_of(static_cast<const BFloat16*>(in), size);
    default:
      return largest_of(static_cast<const float*>(in), size);
  }
}

#if defined(__AVX2__)

// Whether products with `factor` in float32 have the bits of those in float64
// after rounding: powers of two lose digits below the normal numbers only,
// where float16 has none, and which no number grows into.
template <class O>
static bool suits_floats(double factor) {
  constexpr uint64_t kDigits = (uint64_t{1} << 52) - 1;
  uint64_t bits;
  __builtin_memcpy(&bits, &factor, sizeof(bits));
  const double least = std::is_same_v<O, BFloat16> ? 1.0 : 0x1p-126;
  return (bits & kDigits) == 0 && factor >= least && factor <= 0x1p127;
}

template <class T, class O>
static void rescale_floats(const T* in, int64_t whole, float factor, O* out) {
  const Floats factors = Floats{} + factor;
  for (int64_t e = 0; e < whole; e += kStep) {
    fetch<kStep>(in + e);
#pragma GCC unroll 8
    for (int k = 0; k < kSums; ++k) {
      const Floats x = factors * load_floats<kEach>(in + e + k * kEach);
      O* const to = out + e + k * kEach;
      if constexpr (sizeof(O) == 2) {
        write(to, narrow(x, O{}));
      } else {
        write(to, x);
      }
    }
  }
}

#endif

template <class T, class O>
static void rescale_to(const T* in, int64_t size, double factor, O* out) {
  const int64_t whole = size - size % kStep;
  int64_t e = 0;
#if defined(__AVX2__)
  if constexpr (sizeof(T) < 8 && sizeof(O) < 8) {
    if (suits_floats<O>(factor)) {
      rescale_floats(in, whole, static_cast<float>(factor), out);
      e = whole;
    }
  }
#endif
  for (; e < whole; e += kStep) {
    fetch<kStep>(in + e);
    Register<double> x[kSums];
#pragma GCC unroll 8
    for (int k = 0; k < kSums; ++k) {
      x[k] = factor * load<double>(in + e + k * kEach);
    }
    round_step<O, false>(x, out + e);
  }
  for (; e < size; ++e) {
    round_to(factor * to_double(in[e]), out + e);
  }
}

template <class T>
static void rescale_from(
    const void* in,
    int64_t size,
    double factor,
    void* out,
    ScalarKind to) {
  const T* from = static_cast<const T*>(in);
  switch (to) {
    case ScalarKind::kFloat32:
      return rescale_to(from, size, factor, static_cast<float*>(out));
    case ScalarKind::kFloat64:
      return rescale_to(from, size, factor, static_cast<double*>(out));
    case ScalarKind::kFloat16:
      return rescale_to(from, size, factor, static_cast<Half*>(out));
    case ScalarKind::kBFloat16:
      return rescale_to(from, size, factor, static_cast<BFloat16*>(out));
  }
}

static void rescale(
    const void* in,
    ScalarKind from,
    int64_t size,
    double factor,
    void* out,
    ScalarKind to) {
  switch (from) {
    case ScalarKind::kFloat32:
      return rescale_from<float>(in, size, factor, out, to);
    case ScalarKind::kFloat64:
      return rescale_from<double>(in, size, factor, out, to);
    case ScalarKind::kFloat16:
      return rescale_from<Half>(in, size, factor, out, to);
    case ScalarKind::kBFloat16:
      return rescale_from<BFloat16>(in, size, factor, out, to);
  }
}

static uint64_t hash(const void* data, int64_t first, int64_t last) {
  const char* words = static_cast<const char*>(data);
  uint64_t sum = 0;
  for (int64_t word = first; word < last; ++word) {
    uint64_t bits;
    __builtin_memcpy(&bits, words + word * 8, sizeof(bits));
    sum += hash_word(bits, word);
  }
  return sum;
}

} // namespace torch_sm3::distributed::TORCH_SM3_ISA
