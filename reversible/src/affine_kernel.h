// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Kernels of `reversible_affine`, its inverse and its backward on flat memory.
/// Compiled once for each instruction set from affine_kernel_impl.h.

#include <scalar_math.h>

#include <cstdint>

namespace torch_sm3::reversible {

enum class AffineOp : int8_t { kForward, kInverse, kBackward };

struct AffineInput {
  const void* data;
  ScalarKind kind;
};

struct AffineOutput {
  void* data; ///< null: not wanted
  ScalarKind kind;
};

struct Affine {
  AffineOp op;
  /// kForward and kInverse: acc or out, scale, shift. kBackward: grad, acc,
  /// scale.
  AffineInput in[3];
  /// kBackward: gradients of acc and of scale; else only the first.
  AffineOutput out[2];
  bool in_double; ///< float64 arithmetic, else float32
  double clamp;
};

/// Computes the elements from `begin` to `end`.
void affine_scalar(const Affine& affine, int64_t begin, int64_t end);
void affine_avx2(const Affine& affine, int64_t begin, int64_t end);
void affine_avx512(const Affine& affine, int64_t begin, int64_t end);

} // namespace torch_sm3::reversible
