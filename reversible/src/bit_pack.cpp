// SPDX-License-Identifier: Apache-2.0
#include <bit_pack.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>

namespace torch_sm3::reversible {
namespace {

constexpr int64_t kBits = 8;

at::Tensor shifts(const at::Tensor& like) {
  return at::arange(kBits, like.options().dtype(at::kByte));
}

} // namespace

at::Tensor pack_bits(const at::Tensor& mask) {
  const c10::AutoGradMode no_grad(false);
  const int64_t count = mask.numel(), bytes = (count + kBits - 1) / kBits;
  at::Tensor bits = at::zeros({bytes * kBits}, mask.options().dtype(at::kByte));
  bits.narrow(0, 0, count).copy_(mask.reshape({count}));
  return bits.view({bytes, kBits})
      .bitwise_left_shift(shifts(mask))
      .sum({1}, /*keepdim=*/false, at::kByte);
}

at::Tensor unpack_bits(
    const at::Tensor& packed,
    at::IntArrayRef sizes,
    at::IntArrayRef strides) {
  const c10::AutoGradMode no_grad(false);
  const int64_t count = c10::multiply_integers(sizes);
  at::Tensor mask = packed.unsqueeze(1)
                        .bitwise_right_shift(shifts(packed))
                        .bitwise_and(1)
                        .to(at::kBool)
                        .view({packed.size(0) * kBits})
                        .narrow(0, 0, count)
                        .view(sizes);
  const at::Tensor like =
      at::empty_strided(sizes, strides, mask.options().device(at::kMeta));
  if (mask.strides() == strides || !like.is_non_overlapping_and_dense()) {
    return mask;
  }
  return at::empty_strided(sizes, strides, mask.options()).copy_(mask);
}

} // namespace torch_sm3::reversible
