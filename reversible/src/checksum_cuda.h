// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Launch of the CUDA kernel of the checksum, on raw pointers.

#include <checksum_kernel.h>

#include <cuda_runtime_api.h>

namespace torch_sm3::reversible {

/// Adds the parts of `count` > 0 elements to `*sum` on `stream`.
/// \param sum on the device, zero
/// \return what the launch said
cudaError_t launch_checksum(
    const Checksum& x,
    int64_t count,
    int64_t* sum,
    cudaStream_t stream);

} // namespace torch_sm3::reversible
