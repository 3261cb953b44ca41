// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Brings tables to the device without waiting for it, also while a CUDA graph
/// is captured.

#include <ATen/core/Tensor.h>

#include <functional>

namespace torch_sm3 {

/// True if the current stream captures a CUDA graph.
bool sm3_is_capturing();

/// Allocates memory on the current device and fills its beginning from the
/// host.
///
/// \param bytes  to allocate
/// \param filled of those, at the beginning, to copy
/// \param fill   writes them into the host's memory
at::Tensor sm3_upload(
    int64_t bytes,
    int64_t filled,
    const std::function<void(char*)>& fill);

} // namespace torch_sm3
