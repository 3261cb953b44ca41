// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Code of one element of a sidecar, once for host and device.
///
/// An element and its estimate are compared as integers U of their width, put
/// in the order of the numbers, so that neighbours differ by one: the
/// difference of a stream that was rebuilt in floating point is nearly always
/// 0, +1 or -1. Those take two bits. Another difference is an escape: a byte,
/// or where the byte is kSidecarWide the full width.

#include <scalar_math.h>

namespace torch_sm3::reversible {

/// Elements whose escapes begin at a place of their own; their codes fill whole
/// bytes.
inline constexpr int64_t kSidecarTile = 4096;
inline constexpr int64_t kSidecarCodes = 4; ///< in a byte

inline constexpr unsigned kSidecarEscape = 3;
inline constexpr int8_t kSidecarWide = -128;

/// Maps the bits of a float to integers in the order of the numbers, taken as
/// two's complement, and back: it is its own inverse.
template <class U>
TORCH_SM3_INLINE U sidecar_order(U bits) {
  constexpr int kSign = static_cast<int>(sizeof(U)) * 8 - 1;
  const U negative = static_cast<U>(U(0) - static_cast<U>(bits >> kSign));
  const U low = static_cast<U>(static_cast<U>(~U(0)) >> 1);
  return static_cast<U>(bits ^ static_cast<U>(negative & low));
}

/// The difference modulo 2^width of an element and its estimate.
template <class U>
TORCH_SM3_INLINE U sidecar_difference(U x, U estimate) {
  return static_cast<U>(sidecar_order(x) - sidecar_order(estimate));
}

/// The element that differs by `difference` from the estimate.
template <class U>
TORCH_SM3_INLINE U sidecar_element(U estimate, U difference) {
  return sidecar_order(static_cast<U>(sidecar_order(estimate) + difference));
}

/// 0, 1, 2 for the differences 0, +1, -1; else kSidecarEscape.
///
/// Of type U: loops over elements then have one width until they store.
template <class U>
TORCH_SM3_INLINE U sidecar_code(U difference) {
  const U small = difference < U(2) ? difference : U(2);
  return static_cast<U>(difference + U(1)) <= U(2) ? small : U(kSidecarEscape);
}

/// The difference of a code, 0 for an escape.
template <class U>
TORCH_SM3_INLINE U sidecar_small(unsigned code) {
  return static_cast<U>(U(code == 1u) - U(code == 2u));
}

/// True if the difference does not fit in a byte.
template <class U>
TORCH_SM3_INLINE bool sidecar_is_wide(U difference) {
  return static_cast<U>(difference + U(127)) > U(254);
}

/// The difference that a byte stands for.
template <class U>
TORCH_SM3_INLINE U sidecar_from_byte(int8_t byte) {
  return static_cast<U>(static_cast<int64_t>(byte));
}

} // namespace torch_sm3::reversible
