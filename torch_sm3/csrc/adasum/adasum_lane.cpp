// SPDX-License-Identifier: Apache-2.0
#include "adasum_lane.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace torch_sm3::distributed {

Lane::Mark Lane::mark(const at::Tensor& tensor) {
  Mark mark;
  mark.device = tensor.device();
  if (!mark.device.is_cpu()) {
    const c10::impl::VirtualGuardImpl impl(mark.device.type());
    mark.event = std::make_shared<c10::Event>(mark.device.type());
    mark.event->record(impl.getStream(mark.device));
  }
  return mark;
}

Lane::Scope::Scope(Lane& lane, const Mark& mark) {
  if (mark.event != nullptr) {
    const c10::Stream stream = lane.stream_of(mark.device);
    mark.event->block(stream);
    guard_.emplace(stream);
  }
}

c10::Stream Lane::stream_of(c10::Device device) {
  const auto found = streams_.find(device.index());
  if (found != streams_.end()) {
    return found->second;
  }
  const c10::impl::VirtualGuardImpl impl(device.type());
  const c10::Stream stream =
      impl.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  streams_.emplace(device.index(), stream);
  return stream;
}

void Lane::keep(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.device().is_cpu()) {
      const c10::impl::VirtualGuardImpl impl(tensor.device().type());
      tensor.record_stream(impl.getStream(tensor.device()));
    }
  }
}

} // namespace torch_sm3::distributed
