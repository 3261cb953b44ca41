// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// How the tensors of a device travel over a process group.

#include "adasum_transport.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <memory>

namespace torch_sm3::distributed {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// The timeout that a group was made with.
std::chrono::milliseconds timeout_of(const c10d::ProcessGroup& group);

/// Whether a group moves the tensors of a device by collectives that are
/// enqueued on it (NCCL), and not by a host that waits for messages.
bool is_enqueued(const GroupPtr& group, c10::DeviceType device);

/// Whether a group moves tensors by a host that waits (Gloo).
bool has_host(const GroupPtr& group);

/// \param device of the tensors that it will move
std::unique_ptr<Transport> make_transport(
    const GroupPtr& group,
    c10::Device device,
    std::chrono::milliseconds timeout);

} // namespace torch_sm3::distributed
