// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Kernels of `reversible_sidecar_encode` and `reversible_sidecar_decode` on
/// flat memory, tile by tile. The passes over all elements are compiled once
/// for each instruction set from sidecar_kernel_impl.h; those over escapes, few
/// and one after the other, stand in sidecar_kernel_escapes.cpp.

#include <sidecar_math.h>

#include <cstdint>

namespace torch_sm3::reversible {

/// Elements of `width` bytes and their sidecar.
struct Sidecar {
  const void* estimate;
  int64_t count;
  int width; ///< 2, 4 or 8
  int64_t byte_capacity;
  int64_t wide_capacity;
};

/// The sidecar is written.
struct SidecarEncode : Sidecar {
  const void* x;
  uint8_t* codes; ///< kSidecarCodes in each, the first lowest
  int8_t* bytes;
  void* wide;
  int64_t* offsets; ///< two of each tile: its first byte and wide number
};

/// The sidecar is read.
struct SidecarDecode : Sidecar {
  void* x;
  const uint8_t* codes;
  const int8_t* bytes;
  const void* wide;
  const int64_t* offsets;
};

/// Writes the codes of one tile, and into `offsets` how many bytes and wide
/// numbers it needs.
void sidecar_codes_scalar(const SidecarEncode& s, int64_t tile);
void sidecar_codes_avx2(const SidecarEncode& s, int64_t tile);
void sidecar_codes_avx512(const SidecarEncode& s, int64_t tile);

/// Escapes of one tile.
struct SidecarEscapes {
  int8_t bytes[kSidecarTile];
  alignas(8) unsigned char wide[kSidecarTile * 8]; ///< `width` bytes each
};

/// Collects the escapes of one tile, whose codes are there.
void sidecar_collect_escapes(
    const SidecarEncode& s,
    int64_t tile,
    SidecarEscapes& escapes);

/// Rebuilds one tile's elements but for its escapes.
void sidecar_apply_scalar(const SidecarDecode& s, int64_t tile);
void sidecar_apply_avx2(const SidecarDecode& s, int64_t tile);
void sidecar_apply_avx512(const SidecarDecode& s, int64_t tile);

/// Rebuilds the elements of one tile that are escapes.
/// \return false if one of them is beyond the end of the sidecar
bool sidecar_read_escapes(const SidecarDecode& s, int64_t tile);

/// Calls `body(U*)`, a null pointer to the unsigned integer of `width` bytes.
template <class Body>
static inline auto for_width(int width, Body body) {
  switch (width) {
    case 2:
      return body(static_cast<uint16_t*>(nullptr));
    case 4:
      return body(static_cast<uint32_t*>(nullptr));
    default:
      return body(static_cast<uint64_t*>(nullptr));
  }
}

} // namespace torch_sm3::reversible
