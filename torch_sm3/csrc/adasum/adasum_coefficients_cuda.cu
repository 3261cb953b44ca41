// SPDX-License-Identifier: Apache-2.0
#include "adasum_coefficients_cuda.h"

#include "adasum_coefficients_kernel.cuh"

namespace torch_sm3::distributed::cuda {

void launch_coefficients(const LayerTable& table, CUstream_st* stream) {
  if (table.layers > 0) {
    const int64_t blocks =
        (table.layers + kCoefficientThreads - 1) / kCoefficientThreads;
    coefficients<<<
        static_cast<unsigned>(blocks),
        kCoefficientThreads,
        0,
        stream>>>(table);
  }
}

} // namespace torch_sm3::distributed::cuda
