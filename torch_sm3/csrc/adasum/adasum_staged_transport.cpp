// SPDX-License-Identifier: Apache-2.0
#include "adasum_staged_transport.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>

namespace torch_sm3::distributed {
namespace {

// Elements that an all-reduce stages at a time.
constexpr int64_t kPieceBytes = int64_t{16} << 20;

// A buffer of the host like a tensor; pinned, so that copies need no detour.
at::Tensor host_buffer(const at::Tensor& like) {
  const auto options = like.options().device(at::kCPU);
  return at::empty(
      {like.numel()}, options.pinned_memory(!like.device().is_cpu()));
}

// Waits until what the current stream of a device was given is done.
void synchronize(c10::Device device) {
  if (!device.is_cpu()) {
    const c10::impl::VirtualGuardImpl impl(device.type());
    c10::Event event(device.type());
    event.record(impl.getStream(device));
    event.synchronize();
  }
}

} // namespace

class StagedTransport::Stage : public Transport::Posted {
 public:
  std::unique_ptr<Posted> posted;
  // What arrives on the host, and where it belongs.
  std::vector<std::pair<at::Tensor, at::Tensor>> arriving;
};

StagedTransport::StagedTransport(std::unique_ptr<Transport> host, bool always)
    : host_(std::move(host)), always_(always) {}

bool StagedTransport::is_staged(const at::Tensor& tensor) const {
  return tensor.numel() > 0 && (always_ || !tensor.device().is_cpu());
}

std::unique_ptr<Transport::Posted> StagedTransport::post(
    std::vector<Message> receives,
    std::vector<Message> sends,
    int tag,
    std::string what) {
  auto stage = std::make_unique<Stage>();
  count(sends);
  for (Message& message : receives) {
    if (is_staged(message.data)) {
      const at::Tensor buffer = host_buffer(message.data);
      stage->arriving.emplace_back(buffer, message.data);
      message.data = buffer;
    }
  }
  // A tensor for several peers is copied once.
  std::map<std::pair<const void*, int64_t>, at::Tensor> leaving;
  c10::Device device = c10::kCPU;
  for (Message& message : sends) {
    if (is_staged(message.data)) {
      device = message.data.device();
      at::Tensor& buffer =
          leaving[{message.data.const_data_ptr(), message.data.numel()}];
      if (!buffer.defined()) {
        buffer = host_buffer(message.data);
        buffer.copy_(message.data, /*non_blocking=*/true);
      }
      message.data = buffer;
    }
  }
  synchronize(device);
  stage->posted =
      host_->post(std::move(receives), std::move(sends), tag, std::move(what));
  return stage;
}

void StagedTransport::wait(Posted& posted) {
  auto& stage = static_cast<Stage&>(posted);
  host_->wait(*stage.posted);
  for (const auto& [buffer, target] : stage.arriving) {
    target.copy_(buffer, /*non_blocking=*/true);
  }
  // The allocator of pinned memory keeps a buffer until its copy is done.
  stage.arriving.clear();
}

void StagedTransport::sum(at::Tensor& tensor, std::string what) {
  if (!is_staged(tensor)) {
    host_->sum(tensor, std::move(what));
    return;
  }
  const at::Tensor flat = tensor.view({-1});
  const int64_t piece = kPieceBytes / flat.element_size();
  for (int64_t start = 0; start < flat.numel(); start += piece) {
    const at::Tensor part =
        flat.narrow(0, start, std::min(piece, flat.numel() - start));
    at::Tensor buffer = host_buffer(part);
    buffer.copy_(part);
    host_->sum(buffer, what);
    part.copy_(buffer);
  }
}

} // namespace torch_sm3::distributed
