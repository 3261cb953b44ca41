// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Launches of the CUDA kernels of the sidecar, on raw pointers.

#include <sidecar_kernel.h>

#include <cuda_runtime_api.h>

namespace torch_sm3::reversible {

/// Encodes `tiles` > 0 tiles on `stream`.
/// \param used two numbers on the device: how many bytes and wide numbers
/// \return what the launches said
cudaError_t launch_sidecar_encode(
    const SidecarEncode& s,
    int64_t tiles,
    int64_t* used,
    cudaStream_t stream);

/// Decodes `tiles` > 0 tiles on `stream`.
cudaError_t launch_sidecar_decode(
    const SidecarDecode& s,
    int64_t tiles,
    cudaStream_t stream);

} // namespace torch_sm3::reversible
