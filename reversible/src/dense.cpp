// SPDX-License-Identifier: Apache-2.0
#include <dense.h>
#include <scalar_kind.h>

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

namespace torch_sm3::reversible {
namespace {

// A dimension of one element may have any stride.
bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) {
      return false;
    }
  }
  return true;
}

} // namespace

at::Tensor laid_out_as(
    const at::Tensor& like,
    const at::Tensor& tensor,
    at::ScalarType type) {
  if (tensor.scalar_type() == type && same_layout(like, tensor)) {
    return tensor;
  }
  return at::empty_strided(
             like.sizes(), like.strides(), tensor.options().dtype(type))
      .copy_(tensor);
}

at::Tensor laid_out_as(const at::Tensor& like, const at::Tensor& tensor) {
  return laid_out_as(like, tensor, tensor.scalar_type());
}

void check_strided(
    const char* op,
    const char* argument,
    const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == at::kStrided,
      op,
      ": expected a dense tensor, but got the layout ",
      tensor.layout(),
      " (argument '",
      argument,
      "')");
}

void check_real(
    const char* op,
    const char* argument,
    const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(
      has_scalar_kind(tensor.scalar_type()),
      op,
      ": expected float16, bfloat16, float32 or float64, but got ",
      tensor.scalar_type(),
      " (argument '",
      argument,
      "')");
  check_strided(op, argument, tensor);
}

void check_like(
    const char* op,
    const char* argument,
    const at::Tensor& tensor,
    const at::Tensor& like) {
  TORCH_CHECK_VALUE(
      tensor.sym_sizes() == like.sym_sizes(),
      op,
      ": expected the shape ",
      like.sym_sizes(),
      ", but got ",
      tensor.sym_sizes(),
      " (argument '",
      argument,
      "')");
  TORCH_CHECK_VALUE(
      tensor.device() == like.device(),
      op,
      ": expected the device ",
      like.device(),
      ", but got ",
      tensor.device(),
      " (argument '",
      argument,
      "')");
}

} // namespace torch_sm3::reversible
