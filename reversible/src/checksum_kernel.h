// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Kernel of `reversible_checksum` on flat memory. Compiled once for each
/// instruction set from checksum_kernel_impl.h.

#include <cstdint>

namespace torch_sm3::reversible {

/// Elements of `width` bytes: 1, 2, 4 or 8.
struct Checksum {
  const void* data;
  int width;
};

/// Adds up the parts of the elements from `begin` to `end`.
uint64_t checksum_scalar(const Checksum& x, int64_t begin, int64_t end);
uint64_t checksum_avx2(const Checksum& x, int64_t begin, int64_t end);
uint64_t checksum_avx512(const Checksum& x, int64_t begin, int64_t end);

} // namespace torch_sm3::reversible
