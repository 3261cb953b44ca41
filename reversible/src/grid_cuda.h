// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Launch of the CUDA kernels of the grid operators, on raw pointers.

#include <grid_kernel.h>

#include <cuda_runtime_api.h>

namespace torch_sm3::reversible {

/// Computes `count` > 0 elements on `stream`.
/// \param amax of GridOp::kAdd: one number of the stream's type, zero
/// \return what the launch said
cudaError_t
launch_grid(const GridSum& sum, void* amax, int64_t count, cudaStream_t stream);

} // namespace torch_sm3::reversible
