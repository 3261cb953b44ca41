// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/transport.h>

#include <ATen/record_function.h>

#include <cstdint>
#include <vector>

namespace torch_sm3::pipeline {

// A header's rest and a payload of up to this size together travel in one
// transmission with the frame: a rendezvous costs more than to copy that much.
inline constexpr size_t kSmallPayload = size_t{1} << 16;

// While one lives, what is posted is not profiled. Otherwise its end, which may
// come in a later step, would be written to a profiler that is gone by then.
using Unprofiled = at::DisableRecordFunctionGuard;

// The bytes of a dense tensor as a flat uint8 tensor that shares or, if it
// was not contiguous, owns its storage.
at::Tensor payload_bytes(const at::Tensor& tensor);

// A tensor for the elements that `meta` announces. Throws HeaderError if there
// is no such type, no memory for it, or it takes more than `most` bytes.
at::Tensor allocate(
    const TensorMeta& meta,
    size_t most = SIZE_MAX,
    c10::Device device = c10::kCPU);

// Type, shape and differentiability of `tensor`, which must be dense, and on
// the CPU unless its elements travel by the ranks' devices.
TensorMeta meta_of(const at::Tensor& tensor, bool on_device = false);

// Bytes of the elements.
size_t payload_size(const at::Tensor& tensor);

// Writes the bytes of a tensor's elements; returns where they end.
uint8_t* copy_payload(const at::Tensor& tensor, uint8_t* to);

// Whether there are tensors, and of the same types, shapes and places.
bool same_layout(
    const std::vector<TensorMeta>& layout,
    const std::vector<TensorMeta>& tensors);

// Throws HeaderError with the words of `header` unless it is the one expected,
// or poison in its place.
void check(const Header& expected, const Header& header);

// Reads a header that lies in a frame and, if that announces one, a second one.
Header decode_frames(const at::Tensor& frame, const at::Tensor& second);

// Reads a message that lies in one piece in `buffer`, after a frame that
// `decode_fixed` accepts.
Message unpack(const at::Tensor& buffer);

// A flat uint8 tensor.
at::Tensor empty_bytes(size_t size);

// `bytes` as a flat uint8 tensor of its own.
at::Tensor as_tensor(const uint8_t* bytes, size_t size);

} // namespace torch_sm3::pipeline
