// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Body of the CUDA kernel of the affine operators. Compiled by nvcc through
/// affine_cuda.cu and, for tests, by the host compiler after
/// tests/cpp/cuda_on_host.h.

#include <affine_kernel.h>
#include <affine_math.h>

#include <cstdint>

namespace torch_sm3::reversible {

inline constexpr int kAffineThreads = 256;
inline constexpr int kAffinePerThread = 4;

template <class V, class C>
__device__ inline C load_as(const void* data, int64_t i, const C* type) {
  return cast_as(static_cast<const V*>(data)[i], type);
}

// All threads take the same way: a choice here costs less than a kernel for
// each combination of dtypes.
template <class C>
__device__ inline C load(const AffineInput& input, int64_t i) {
  const C* type = nullptr;
  switch (input.kind) {
    case ScalarKind::kFloat64:
      return load_as<double>(input.data, i, type);
    case ScalarKind::kFloat16:
      return load_as<Half>(input.data, i, type);
    case ScalarKind::kBFloat16:
      return load_as<BFloat16>(input.data, i, type);
    default:
      return load_as<float>(input.data, i, type);
  }
}

template <class C>
__device__ inline void store(C x, int64_t i, const AffineOutput& output) {
  switch (output.kind) {
    case ScalarKind::kFloat64:
      return round_to(
          static_cast<double>(x), static_cast<double*>(output.data) + i);
    case ScalarKind::kFloat16:
      return round_to(x, static_cast<Half*>(output.data) + i);
    case ScalarKind::kBFloat16:
      return round_to(x, static_cast<BFloat16*>(output.data) + i);
    default:
      return round_to(x, static_cast<float*>(output.data) + i);
  }
}

template <AffineOp kOp, class C>
__device__ inline void affine_element(const Affine& affine, int64_t i) {
  const C clamp = static_cast<C>(affine.clamp);
  const C x = load<C>(affine.in[0], i);
  const C y = load<C>(affine.in[1], i);
  const C z = load<C>(affine.in[2], i);
  if constexpr (kOp == AffineOp::kForward) {
    store(reversible::affine(x, y, z, clamp), i, affine.out[0]);
  } else if constexpr (kOp == AffineOp::kInverse) {
    store(affine_inverse(x, y, z, clamp), i, affine.out[0]);
  } else {
    const AffineGrads<C> grads = affine_backward(x, y, z, clamp);
    store(grads.acc, i, affine.out[0]);
    store(grads.scale, i, affine.out[1]);
  }
}

/// A block computes kAffineThreads * kAffinePerThread elements.
template <AffineOp kOp, class C>
__global__ void __launch_bounds__(kAffineThreads)
    affine_kernel(Affine affine, int64_t count) {
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * blockDim.x * kAffinePerThread +
      threadIdx.x;
  for (int k = 0; k < kAffinePerThread; ++k) {
    const int64_t i = first + static_cast<int64_t>(k) * blockDim.x;
    if (i < count) {
      affine_element<kOp, C>(affine, i);
    }
  }
}

} // namespace torch_sm3::reversible
