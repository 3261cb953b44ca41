// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Between tensors and the flat memory that the sidecar kernels take.

#include <sidecar_kernel.h>

#include <ATen/core/Tensor.h>

#include <tuple>

namespace torch_sm3::reversible {

using SidecarTensors =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// The integers of the width of the tensor's elements.
at::ScalarType sidecar_wide_type(const at::Tensor& x);

/// Checks the arguments of `reversible_sidecar_encode`.
void check_sidecar_encode(
    const at::Tensor& x,
    const at::Tensor& estimate,
    const c10::SymInt& byte_capacity,
    const c10::SymInt& wide_capacity);

/// Checks the arguments of `reversible_sidecar_decode`.
void check_sidecar_decode(
    const at::Tensor& estimate,
    const at::Tensor& codes,
    const at::Tensor& bytes,
    const at::Tensor& wide,
    const at::Tensor& offsets);

/// Tensors of one encoding, and the kernel's view of them.
struct SidecarEncoding {
  at::Tensor x, estimate, codes, bytes, wide, offsets, used;
  SidecarEncode sidecar;
  int64_t tiles;
};

/// Allocates the results, `bytes` and `wide` filled with zeros.
SidecarEncoding sidecar_encoding(
    const at::Tensor& x,
    const at::Tensor& estimate,
    int64_t byte_capacity,
    int64_t wide_capacity);

/// Tensors of one decoding, and the kernel's view of them.
struct SidecarDecoding {
  at::Tensor x, estimate, codes, bytes, wide, offsets;
  SidecarDecode sidecar;
  int64_t tiles;
};

/// Allocates the result.
SidecarDecoding sidecar_decoding(
    const at::Tensor& estimate,
    const at::Tensor& codes,
    const at::Tensor& bytes,
    const at::Tensor& wide,
    const at::Tensor& offsets);

} // namespace torch_sm3::reversible
