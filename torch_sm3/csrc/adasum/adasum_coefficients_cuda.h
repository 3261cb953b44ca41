// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Launch of the coefficients' CUDA kernel: raw pointers and a stream.

#include "adasum_coefficients_kernel.h"

struct CUstream_st;

namespace torch_sm3::distributed::cuda {

void launch_coefficients(const LayerTable& table, CUstream_st* stream);

} // namespace torch_sm3::distributed::cuda
