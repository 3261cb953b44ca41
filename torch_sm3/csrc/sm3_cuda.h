// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Launches of the CUDA kernels of SM3, on raw pointers.

#include <sm3_device.h>
#include <sm3_math.h>

#include <cuda_runtime_api.h>

namespace torch_sm3 {

/// Updates one parameter on `stream`.
/// \return what the launch said
cudaError_t launch_sm3_update(
    const SM3DeviceTensor<float>& tensor,
    const SM3Coefficients<float>& coefficients,
    ScalarKind param_kind,
    ScalarKind grad_kind,
    cudaStream_t stream);
cudaError_t launch_sm3_update(
    const SM3DeviceTensor<double>& tensor,
    const SM3Coefficients<double>& coefficients,
    ScalarKind param_kind,
    ScalarKind grad_kind,
    cudaStream_t stream);

} // namespace torch_sm3
