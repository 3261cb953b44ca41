// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The coefficients of many layers, one function per device.

#include "adasum_coefficients_kernel.h"

namespace torch_sm3::distributed {

void coefficients_cpu(const LayerTable& table);

/// Enqueues on the current stream of the current device.
void coefficients_cuda(const LayerTable& table);

} // namespace torch_sm3::distributed
