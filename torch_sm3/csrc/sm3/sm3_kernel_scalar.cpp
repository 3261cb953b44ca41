// SPDX-License-Identifier: Apache-2.0
#define TORCH_SM3_ISA scalar
#include <sm3_kernel_impl.h>
