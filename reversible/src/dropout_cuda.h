// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Launch of the CUDA kernels of dropout, on raw pointers.

#include <dropout_kernel.h>

#include <cuda_runtime_api.h>

namespace torch_sm3::reversible {

/// Computes `count` > 0 elements on `stream`.
/// \param seed on the device: a captured graph reads it at each replay
/// \return what the launch said
cudaError_t launch_dropout(
    const Dropout& d,
    const int64_t* seed,
    int64_t count,
    cudaStream_t stream);

} // namespace torch_sm3::reversible
