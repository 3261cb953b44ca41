// SPDX-License-Identifier: Apache-2.0
#include <transport/payload.h>

#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace torch_sm3::pipeline {
namespace {

bool can_travel(c10::ScalarType type) {
  return type >= c10::ScalarType::Byte && type < c10::ScalarType::Undefined &&
         !c10::isQIntType(type) && !c10::isBitsType(type);
}

} // namespace

at::Tensor payload_bytes(const at::Tensor& tensor) {
  // A tensor of one element counts as contiguous whatever its strides are, for
  // example 0 after expand(), but only a stride of 1 may be seen as bytes.
  return tensor.detach()
      .resolve_conj()
      .resolve_neg()
      .contiguous()
      .as_strided({tensor.numel()}, {1})
      .view(c10::ScalarType::Byte);
}

at::Tensor allocate(const TensorMeta& meta, size_t most, c10::Device device) {
  const auto type = static_cast<c10::ScalarType>(meta.dtype);
  if (!can_travel(type)) {
    throw HeaderError(
        "header: expected a dtype, but got number " +
        std::to_string(meta.dtype));
  }
  size_t size = c10::elementSize(type);
  for (const int64_t length : meta.sizes) {
    size *=
        static_cast<size_t>(length); // decode has seen that it does not wrap
  }
  if (size > most) {
    throw HeaderError("header: expected a smaller tensor in a small message");
  }
  try {
    return at::empty(meta.sizes, at::TensorOptions(type).device(device));
  } catch (const std::exception& error) {
    throw HeaderError(
        std::string("header: expected memory for a tensor: ") + error.what());
  }
}

TensorMeta meta_of(const at::Tensor& tensor, bool on_device) {
  TORCH_CHECK_TYPE(
      tensor.layout() == c10::kStrided &&
          (on_device || tensor.device().is_cpu()) &&
          can_travel(tensor.scalar_type()),
      "PipelineTransport: expected dense CPU tensors, or dense CUDA tensors "
      "between stages whose weights are on CUDA and whose group is of NCCL, "
      "but got ",
      tensor.toString(),
      " on ",
      tensor.device(),
      " (argument 'tensors')");
  return {
      static_cast<int8_t>(tensor.scalar_type()),
      tensor.requires_grad(),
      tensor.sizes().vec(),
      on_device};
}

size_t payload_size(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0 : tensor.nbytes();
}

uint8_t* copy_payload(const at::Tensor& tensor, uint8_t* to) {
  const size_t size = payload_size(tensor);
  if (size > 0) {
    const bool plain =
        tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
    const at::Tensor bytes = plain ? tensor : payload_bytes(tensor);
    std::memcpy(to, bytes.const_data_ptr(), size);
  }
  return to + size;
}

bool same_layout(
    const std::vector<TensorMeta>& layout,
    const std::vector<TensorMeta>& tensors) {
  return !layout.empty() && std::equal(
                                layout.begin(),
                                layout.end(),
                                tensors.begin(),
                                tensors.end(),
                                [](const TensorMeta& a, const TensorMeta& b) {
                                  return a.dtype == b.dtype &&
                                         a.sizes == b.sizes &&
                                         a.on_device == b.on_device;
                                });
}

void check(const Header& expected, const Header& header) {
  const bool same =
      (header.message_class == expected.message_class ||
       header.message_class == MessageClass::kPoison) &&
      (header.flags & kEvaluation) == (expected.flags & kEvaluation) &&
      header.step == expected.step && header.epoch == expected.epoch &&
      header.microbatch == expected.microbatch &&
      header.source == expected.source && header.target == expected.target;
  if (!same) {
    throw HeaderError(describe(header));
  }
}

Header decode_frames(const at::Tensor& frame, const at::Tensor& second) {
  const auto* data = frame.const_data_ptr<uint8_t>();
  std::vector<uint8_t> bytes(data, data + kFrameBytes);
  if (second.defined()) {
    const auto* rest = second.const_data_ptr<uint8_t>();
    bytes.insert(bytes.end(), rest, rest + second.numel());
  }
  return decode(bytes);
}

Message unpack(const at::Tensor& buffer) {
  const auto* data = buffer.const_data_ptr<uint8_t>();
  const size_t rest = second_frame_bytes(data);
  if (rest > kSmallPayload) {
    throw HeaderError("header: expected a small message");
  }
  const uint8_t* payload = data + kFrameBytes + rest;
  const uint8_t* end = data + buffer.numel();
  Message message{decode({data, payload}), {}};
  for (const TensorMeta& meta : message.header.tensors) {
    if (meta.on_device) {
      message.tensors.emplace_back(); // comes another way
      continue;
    }
    message.tensors.push_back(
        allocate(meta, static_cast<size_t>(end - payload)));
    const at::Tensor& tensor = message.tensors.back();
    if (const size_t size = payload_size(tensor)) {
      std::memcpy(tensor.mutable_data_ptr(), payload, size);
      payload += size;
    }
  }
  return message;
}

at::Tensor empty_bytes(size_t size) {
  return at::empty({static_cast<int64_t>(size)}, at::TensorOptions(at::kByte));
}

at::Tensor as_tensor(const uint8_t* bytes, size_t size) {
  at::Tensor tensor = empty_bytes(size);
  std::memcpy(tensor.mutable_data_ptr<uint8_t>(), bytes, size);
  return tensor;
}

} // namespace torch_sm3::pipeline
