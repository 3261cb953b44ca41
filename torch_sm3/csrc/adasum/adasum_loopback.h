// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Messages between threads of one process, for tests and simulations.

#include "adasum_transport.h"

#include <chrono>
#include <memory>
#include <vector>

namespace torch_sm3::distributed {

/// Makes a group of ranks inside this process, one transport for each.
///
/// Each transport is for one thread. Messages move without anybody waiting for
/// them, as those of a network do: whoever posts the second half of a message
/// copies it. A destroyed transport is a dead rank: what others still wait for
/// from it fails at once.
///
/// \param ranks      number of ranks
/// \param timeout    longest wait for one message
/// \param host_waits what `Transport::host_waits` answers
std::vector<std::unique_ptr<Transport>> loopback_transports(
    int ranks,
    std::chrono::milliseconds timeout,
    bool host_waits = true);

} // namespace torch_sm3::distributed
