// SPDX-License-Identifier: Apache-2.0

/// \file
/// Bodies of the CPU kernels over all elements; included by
/// sidecar_kernel_{scalar,avx2,avx512}.cpp, which define TORCH_SM3_ISA, the end
/// of the functions' names.

#include <instruction_sets.h>
#include <sidecar_kernel.h>

namespace torch_sm3::reversible {
namespace {

// A tile's codes, one in each byte, rest of the last four included.
struct Codes {
  alignas(64) uint8_t code[kSidecarTile];
};

// Four codes in each byte. As 32-bit numbers, little-endian like all machines
// that torch runs on, four bytes are packed at a time.
void pack(const Codes& in, uint8_t* __restrict__ out, int64_t bytes) {
  for (int64_t j = 0; j < bytes; ++j) {
    uint32_t four;
    memcpy(&four, in.code + 4 * j, 4);
    out[j] = static_cast<uint8_t>(four | four >> 6 | four >> 12 | four >> 18);
  }
}

void unpack(const uint8_t* __restrict__ in, Codes& out, int64_t bytes) {
  for (int64_t j = 0; j < bytes; ++j) {
    const uint32_t byte = in[j];
    const uint32_t four =
        (byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303u;
    memcpy(out.code + 4 * j, &four, 4);
  }
}

int64_t size_of_tile(const Sidecar& s, int64_t tile) {
  const int64_t left = s.count - tile * kSidecarTile;
  return left < kSidecarTile ? left : kSidecarTile;
}

int64_t bytes_of(int64_t size) {
  return (size + kSidecarCodes - 1) / kSidecarCodes;
}

template <class U>
void tile_codes(const SidecarEncode& s, int64_t tile) {
  const int64_t first = tile * kSidecarTile;
  const int64_t size = size_of_tile(s, tile);
  const U* __restrict__ x = static_cast<const U*>(s.x) + first;
  const U* __restrict__ estimate = static_cast<const U*>(s.estimate) + first;
  Codes codes;
  // A tile's counts fit in 16 bits; of the elements' own width they need no
  // conversion inside the loop.
  U escapes = 0;
  U wide = 0;
  for (int64_t i = 0; i < size; ++i) {
    const U difference = sidecar_difference(x[i], estimate[i]);
    const U code = sidecar_code(difference);
    codes.code[i] = static_cast<uint8_t>(code);
    escapes = static_cast<U>(escapes + U(code == kSidecarEscape));
    wide = static_cast<U>(wide + U(sidecar_is_wide(difference)));
  }
  const int64_t bytes = bytes_of(size);
  for (int64_t i = size; i < bytes * kSidecarCodes; ++i) {
    codes.code[i] = 0;
  }
  pack(codes, s.codes + first / kSidecarCodes, bytes);
  s.offsets[2 * tile] = static_cast<int64_t>(escapes);
  s.offsets[2 * tile + 1] = static_cast<int64_t>(wide);
}

template <class U>
void tile_apply(const SidecarDecode& s, int64_t tile) {
  const int64_t first = tile * kSidecarTile;
  const int64_t size = size_of_tile(s, tile);
  const U* __restrict__ estimate = static_cast<const U*>(s.estimate) + first;
  U* __restrict__ x = static_cast<U*>(s.x) + first;
  Codes codes;
  unpack(s.codes + first / kSidecarCodes, codes, bytes_of(size));
  for (int64_t i = 0; i < size; ++i) {
    x[i] = sidecar_element(estimate[i], sidecar_small<U>(codes.code[i]));
  }
}

} // namespace

void TORCH_SM3_FOR_ISA(sidecar_codes)(const SidecarEncode& s, int64_t tile) {
  for_width(s.width, [&]<class U>(U*) { tile_codes<U>(s, tile); });
}

void TORCH_SM3_FOR_ISA(sidecar_apply)(const SidecarDecode& s, int64_t tile) {
  for_width(s.width, [&]<class U>(U*) { tile_apply<U>(s, tile); });
}

} // namespace torch_sm3::reversible
