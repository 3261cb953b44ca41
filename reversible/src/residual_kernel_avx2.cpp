// SPDX-License-Identifier: Apache-2.0
#define TORCH_SM3_RESIDUAL residual_avx2
#include <residual_kernel_impl.h>
