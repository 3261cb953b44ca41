// SPDX-License-Identifier: Apache-2.0
#define TORCH_SM3_ISA scalar
#include <affine_kernel_impl.h>
