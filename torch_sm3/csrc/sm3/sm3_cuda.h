// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Launches of the CUDA kernels of SM3.

#include <sm3_device.h>

#include <cuda_runtime_api.h>

namespace torch_sm3 {

/// Each runs on `stream`; what went wrong is what cudaGetLastError says.
void launch_sm3_dense(const SM3DenseLaunch<float>& step, cudaStream_t stream);
void launch_sm3_dense(const SM3DenseLaunch<double>& step, cudaStream_t stream);
void launch_sm3_sparse(const SM3SparseLaunch<float>& step, cudaStream_t stream);
void launch_sm3_sparse(
    const SM3SparseLaunch<double>& step,
    cudaStream_t stream);
void launch_sm3_maxima(const SM3DenseLaunch<float>& pass, cudaStream_t stream);
void launch_sm3_maxima(const SM3DenseLaunch<double>& pass, cudaStream_t stream);
void launch_sm3_nonfinite(const SM3NonfiniteLaunch& pass, cudaStream_t stream);

} // namespace torch_sm3
