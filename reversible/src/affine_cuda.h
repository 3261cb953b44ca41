// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Launch of the CUDA kernel of the affine operators, on raw pointers.

#include <affine_kernel.h>

#include <cuda_runtime_api.h>

namespace torch_sm3::reversible {

/// Computes `count` > 0 elements on `stream`.
/// \return what the launch said
cudaError_t
launch_affine(const Affine& affine, int64_t count, cudaStream_t stream);

} // namespace torch_sm3::reversible
