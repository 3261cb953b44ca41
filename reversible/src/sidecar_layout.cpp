// SPDX-License-Identifier: Apache-2.0
#include <dense.h>
#include <sidecar_layout.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

namespace torch_sm3::reversible {
namespace {

constexpr const char* kEncode = "reversible_sidecar_encode";
constexpr const char* kDecode = "reversible_sidecar_decode";

c10::SymInt divide_up(const c10::SymInt& count, int64_t by) {
  return (count + by - 1) / by;
}

void check_capacity(const char* argument, const c10::SymInt& capacity) {
  TORCH_CHECK_VALUE(
      capacity >= 0,
      kEncode,
      ": expected a number >= 0, but got ",
      capacity,
      " (argument '",
      argument,
      "')");
}

// A part of a sidecar.
void check_part(
    const char* argument,
    const at::Tensor& part,
    const at::Tensor& estimate,
    at::ScalarType type) {
  TORCH_CHECK_TYPE(
      part.scalar_type() == type,
      kDecode,
      ": expected ",
      type,
      ", but got ",
      part.scalar_type(),
      " (argument '",
      argument,
      "')");
  check_strided(kDecode, argument, part);
  TORCH_CHECK_VALUE(
      part.device() == estimate.device(),
      kDecode,
      ": expected the device ",
      estimate.device(),
      ", but got ",
      part.device(),
      " (argument '",
      argument,
      "')");
}

void check_shape(
    const char* argument,
    const at::Tensor& part,
    c10::SymIntArrayRef shape) {
  TORCH_CHECK_VALUE(
      part.sym_sizes() == shape,
      kDecode,
      ": expected the shape ",
      shape,
      ", but got ",
      part.sym_sizes(),
      " (argument '",
      argument,
      "')");
}

void check_vector(const char* argument, const at::Tensor& part) {
  TORCH_CHECK_VALUE(
      part.dim() == 1,
      kDecode,
      ": expected one dimension, but got the shape ",
      part.sym_sizes(),
      " (argument '",
      argument,
      "')");
}

} // namespace

at::ScalarType sidecar_wide_type(const at::Tensor& x) {
  switch (x.element_size()) {
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

void check_sidecar_encode(
    const at::Tensor& x,
    const at::Tensor& estimate,
    const c10::SymInt& byte_capacity,
    const c10::SymInt& wide_capacity) {
  check_real(kEncode, "x", x);
  check_strided(kEncode, "estimate", estimate);
  TORCH_CHECK_TYPE(
      estimate.scalar_type() == x.scalar_type(),
      kEncode,
      ": expected the dtype ",
      x.scalar_type(),
      ", but got ",
      estimate.scalar_type(),
      " (argument 'estimate')");
  check_like(kEncode, "estimate", estimate, x);
  check_capacity("byte_capacity", byte_capacity);
  check_capacity("wide_capacity", wide_capacity);
}

void check_sidecar_decode(
    const at::Tensor& estimate,
    const at::Tensor& codes,
    const at::Tensor& bytes,
    const at::Tensor& wide,
    const at::Tensor& offsets) {
  check_real(kDecode, "estimate", estimate);
  check_part("codes", codes, estimate, at::kByte);
  check_part("bytes", bytes, estimate, at::kChar);
  check_part("wide", wide, estimate, sidecar_wide_type(estimate));
  check_part("offsets", offsets, estimate, at::kLong);
  const c10::SymInt count = estimate.sym_numel();
  check_shape("codes", codes, {divide_up(count, kSidecarCodes)});
  check_shape("offsets", offsets, {divide_up(count, kSidecarTile), 2});
  check_vector("bytes", bytes);
  check_vector("wide", wide);
}

SidecarEncoding sidecar_encoding(
    const at::Tensor& x,
    const at::Tensor& estimate,
    int64_t byte_capacity,
    int64_t wide_capacity) {
  SidecarEncoding e;
  // Never written: only its strides are asked for.
  const at::Tensor like = at::empty_like(x, x.options().device(at::kMeta));
  e.x = laid_out_as(like, x);
  e.estimate = laid_out_as(like, estimate);
  const int64_t count = x.numel();
  e.tiles = (count + kSidecarTile - 1) / kSidecarTile;
  const auto options = x.options();
  e.codes = at::empty(
      {(count + kSidecarCodes - 1) / kSidecarCodes}, options.dtype(at::kByte));
  e.bytes = at::zeros({byte_capacity}, options.dtype(at::kChar));
  e.wide = at::zeros({wide_capacity}, options.dtype(sidecar_wide_type(x)));
  e.offsets = at::empty({e.tiles, 2}, options.dtype(at::kLong));
  e.used = at::empty({2}, options.dtype(at::kLong));
  SidecarEncode& s = e.sidecar;
  s.estimate = e.estimate.const_data_ptr();
  s.count = count;
  s.width = static_cast<int>(x.element_size());
  s.byte_capacity = byte_capacity;
  s.wide_capacity = wide_capacity;
  s.x = e.x.const_data_ptr();
  s.codes = e.codes.mutable_data_ptr<uint8_t>();
  s.bytes = e.bytes.mutable_data_ptr<int8_t>();
  s.wide = e.wide.mutable_data_ptr();
  s.offsets = e.offsets.mutable_data_ptr<int64_t>();
  return e;
}

SidecarDecoding sidecar_decoding(
    const at::Tensor& estimate,
    const at::Tensor& codes,
    const at::Tensor& bytes,
    const at::Tensor& wide,
    const at::Tensor& offsets) {
  SidecarDecoding d;
  d.x = at::empty_like(estimate);
  d.estimate = laid_out_as(d.x, estimate);
  d.codes = codes.contiguous();
  d.bytes = bytes.contiguous();
  d.wide = wide.contiguous();
  d.offsets = offsets.contiguous();
  d.tiles = offsets.size(0);
  SidecarDecode& s = d.sidecar;
  s.estimate = d.estimate.const_data_ptr();
  s.count = estimate.numel();
  s.width = static_cast<int>(estimate.element_size());
  s.byte_capacity = bytes.numel();
  s.wide_capacity = wide.numel();
  s.x = d.x.mutable_data_ptr();
  s.codes = d.codes.const_data_ptr<uint8_t>();
  s.bytes = d.bytes.const_data_ptr<int8_t>();
  s.wide = d.wide.const_data_ptr();
  s.offsets = d.offsets.const_data_ptr<int64_t>();
  return d;
}

} // namespace torch_sm3::reversible
