// SPDX-License-Identifier: Apache-2.0
#include "adasum_channel.h"

#include "adasum_collective_transport.h"
#include "adasum_group_transport.h"
#include "adasum_staged_transport.h"

#include <algorithm>

namespace torch_sm3::distributed {
namespace {

bool serves(const GroupPtr& group, c10::DeviceType device) {
  const std::vector<c10::Device> devices = group->getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(), [&](c10::Device served) {
    return served.type() == device;
  });
}

} // namespace

std::chrono::milliseconds timeout_of(const c10d::ProcessGroup& group) {
  return group.getDefaultBackend()->getBackendOptions()->timeout;
}

bool is_enqueued(const GroupPtr& group, c10::DeviceType device) {
  return device != c10::kCPU && serves(group, device) &&
         group->getBackend(device)->getBackendName() != "gloo";
}

bool has_host(const GroupPtr& group) {
  return serves(group, c10::kCPU);
}

std::unique_ptr<Transport> make_transport(
    const GroupPtr& group,
    c10::Device device,
    std::chrono::milliseconds timeout) {
  if (is_enqueued(group, device.type())) {
    return std::make_unique<CollectiveTransport>(group, device, timeout);
  }
  return std::make_unique<StagedTransport>(
      std::make_unique<GroupTransport>(group, timeout));
}

} // namespace torch_sm3::distributed
