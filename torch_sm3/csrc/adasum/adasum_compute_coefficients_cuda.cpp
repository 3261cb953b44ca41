// SPDX-License-Identifier: Apache-2.0
#include "adasum_compute_coefficients.h"

#include "adasum_coefficients_cuda.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

namespace torch_sm3::distributed {

void coefficients_cuda(const LayerTable& table) {
  cuda::launch_coefficients(table, c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

} // namespace torch_sm3::distributed
