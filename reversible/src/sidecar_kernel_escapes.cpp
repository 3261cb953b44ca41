// SPDX-License-Identifier: Apache-2.0
#include <sidecar_kernel.h>

#include <algorithm>
#include <bit>

namespace torch_sm3::reversible {
namespace {

// Calls `body(i)` for each escape of a tile, in order, until it says false. 32
// codes are looked at together.
template <class Body>
bool for_each_escape(
    const uint8_t* codes,
    int64_t count,
    int64_t tile,
    Body body) {
  constexpr int64_t kAtOnce = 8 * kSidecarCodes;
  const int64_t end = std::min(count, (tile + 1) * kSidecarTile);
  for (int64_t i = tile * kSidecarTile; i < end; i += kAtOnce) {
    const int64_t left = (end - i + kSidecarCodes - 1) / kSidecarCodes;
    uint64_t word = 0;
    memcpy(&word, codes + i / kSidecarCodes, left < 8 ? left : 8);
    // Both bits of a code are set.
    word &= word >> 1 & 0x5555555555555555u;
    for (; word != 0; word &= word - 1) {
      const int64_t index = i + std::countr_zero(word) / 2;
      if (index < end && !body(index)) {
        return false;
      }
    }
  }
  return true;
}

template <class U>
void collect(const SidecarEncode& s, int64_t tile, SidecarEscapes& escapes) {
  const U* x = static_cast<const U*>(s.x);
  const U* estimate = static_cast<const U*>(s.estimate);
  int8_t* byte = escapes.bytes;
  unsigned char* wide = escapes.wide;
  for_each_escape(s.codes, s.count, tile, [&](int64_t i) {
    const U difference = sidecar_difference(x[i], estimate[i]);
    const bool is_wide = sidecar_is_wide(difference);
    *byte++ = is_wide ? kSidecarWide : static_cast<int8_t>(difference);
    // Always written, counted only if it is one: there is room.
    memcpy(wide, &difference, sizeof(U));
    wide += is_wide ? sizeof(U) : 0;
    return true;
  });
}

template <class U>
bool read_escapes(const SidecarDecode& s, int64_t tile) {
  const U* estimate = static_cast<const U*>(s.estimate);
  const U* wide = static_cast<const U*>(s.wide);
  U* x = static_cast<U*>(s.x);
  int64_t byte = s.offsets[2 * tile];
  int64_t number = s.offsets[2 * tile + 1];
  return for_each_escape(s.codes, s.count, tile, [&](int64_t i) {
    if (byte < 0 || byte >= s.byte_capacity) {
      return false;
    }
    const int8_t value = s.bytes[byte++];
    if (value != kSidecarWide) {
      x[i] = sidecar_element(estimate[i], sidecar_from_byte<U>(value));
      return true;
    }
    if (number < 0 || number >= s.wide_capacity) {
      return false;
    }
    x[i] = sidecar_element(estimate[i], wide[number++]);
    return true;
  });
}

} // namespace

void sidecar_collect_escapes(
    const SidecarEncode& s,
    int64_t tile,
    SidecarEscapes& escapes) {
  for_width(s.width, [&]<class U>(U*) { collect<U>(s, tile, escapes); });
}

bool sidecar_read_escapes(const SidecarDecode& s, int64_t tile) {
  return for_width(
      s.width, [&]<class U>(U*) { return read_escapes<U>(s, tile); });
}

} // namespace torch_sm3::reversible
