// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Hashes that name calls and their messages.

#include <cstdint>

namespace torch_sm3::distributed {

inline constexpr uint64_t kHashStart = 0xcbf29ce484222325u;

/// FNV-1a over the bytes of one more word.
inline uint64_t mix(uint64_t hash, uint64_t word) {
  for (int byte = 0; byte < 8; ++byte) {
    hash = (hash ^ ((word >> (8 * byte)) & 0xffu)) * 0x100000001b3u;
  }
  return hash;
}

/// The 31 bits that a message carries.
inline int tag_of(uint64_t hash) {
  return static_cast<int>((hash ^ (hash >> 31)) & 0x7fffffffu);
}

} // namespace torch_sm3::distributed
