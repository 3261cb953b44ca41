// SPDX-License-Identifier: Apache-2.0

/// \file
/// Bodies of the CPU kernels; included by
/// affine_kernel_{scalar,avx2,avx512}.cpp, which define TORCH_SM3_ISA, the end
/// of the function's name.

#include <affine_kernel.h>
#include <affine_math.h>
#include <instruction_sets.h>

#include <algorithm>

namespace torch_sm3::reversible {
namespace {

// Elements that are widened, computed and rounded together, in the first cache.
constexpr int64_t kChunk = 512;

template <class C>
struct Buffers {
  alignas(64) C in[3][kChunk];
  alignas(64) C out[2][kChunk];
};

template <class C>
void load(const AffineInput& input, int64_t first, int64_t size, C* buffer) {
  for_kind(input.kind, [&]<class V>(V*) {
    const V* __restrict__ data = static_cast<const V*>(input.data) + first;
    C* __restrict__ to = buffer;
    for (int64_t i = 0; i < size; ++i) {
      to[i] = cast_as(data[i], static_cast<const C*>(nullptr));
    }
  });
}

template <class C>
void store(
    const C* buffer,
    int64_t first,
    int64_t size,
    const AffineOutput& output) {
  if (output.data == nullptr) {
    return;
  }
  for_kind(output.kind, [&]<class V>(V*) {
    V* __restrict__ data = static_cast<V*>(output.data) + first;
    const C* __restrict__ from = buffer;
    for (int64_t i = 0; i < size; ++i) {
      round_to(from[i], &data[i]);
    }
  });
}

template <AffineOp kOp, class C>
void compute(Buffers<C>& b, int64_t size, C clamp) {
  for (int64_t i = 0; i < size; ++i) {
    const C x = b.in[0][i], y = b.in[1][i], z = b.in[2][i];
    if constexpr (kOp == AffineOp::kForward) {
      b.out[0][i] = reversible::affine(x, y, z, clamp);
    } else if constexpr (kOp == AffineOp::kInverse) {
      b.out[0][i] = affine_inverse(x, y, z, clamp);
    } else {
      const AffineGrads<C> grads = affine_backward(x, y, z, clamp);
      b.out[0][i] = grads.acc;
      b.out[1][i] = grads.scale;
    }
  }
}

template <AffineOp kOp, class C>
void affine_range(const Affine& affine, int64_t begin, int64_t end) {
  Buffers<C> buffers;
  for (int64_t first = begin; first < end; first += kChunk) {
    const int64_t size = std::min(kChunk, end - first);
    for (int k = 0; k < 3; ++k) {
      load(affine.in[k], first, size, buffers.in[k]);
    }
    compute<kOp>(buffers, size, static_cast<C>(affine.clamp));
    store(buffers.out[0], first, size, affine.out[0]);
    if constexpr (kOp == AffineOp::kBackward) {
      store(buffers.out[1], first, size, affine.out[1]);
    }
  }
}

template <class C>
void affine_for_op(const Affine& affine, int64_t begin, int64_t end) {
  switch (affine.op) {
    case AffineOp::kForward:
      return affine_range<AffineOp::kForward, C>(affine, begin, end);
    case AffineOp::kInverse:
      return affine_range<AffineOp::kInverse, C>(affine, begin, end);
    case AffineOp::kBackward:
      return affine_range<AffineOp::kBackward, C>(affine, begin, end);
  }
}

} // namespace

void TORCH_SM3_FOR_ISA(
    affine)(const Affine& affine, int64_t begin, int64_t end) {
  if (affine.in_double) {
    affine_for_op<double>(affine, begin, end);
  } else {
    affine_for_op<float>(affine, begin, end);
  }
}

} // namespace torch_sm3::reversible
