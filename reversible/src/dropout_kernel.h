// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Kernel of `reversible_dropout` on flat memory. Compiled once for each
/// instruction set from dropout_kernel_impl.h.

#include <dropout_math.h>

#include <cstdint>

namespace torch_sm3::reversible {

struct Dropout {
  const void* x;
  void* out;
  ScalarKind kind;
  DropoutIndex index;
  uint64_t threshold; ///< smaller words drop; 2^32 at most
  double scale;       ///< of what is kept
};

/// Computes the elements from `begin` to `end`.
/// \param seed of the random sequence
void dropout_scalar(
    const Dropout& d,
    uint64_t seed,
    int64_t begin,
    int64_t end);
void dropout_avx2(const Dropout& d, uint64_t seed, int64_t begin, int64_t end);
void dropout_avx512(
    const Dropout& d,
    uint64_t seed,
    int64_t begin,
    int64_t end);

} // namespace torch_sm3::reversible
