// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Names of a CPU kernel that is compiled once for each instruction set.

/// In the kernel's file: `name_scalar`, `name_avx2` or `name_avx512`, after
/// TORCH_SM3_ISA.
#define TORCH_SM3_FOR_ISA(name) TORCH_SM3_PASTE(name##_, TORCH_SM3_ISA)
#define TORCH_SM3_PASTE(a, b) TORCH_SM3_PASTE_(a, b)
#define TORCH_SM3_PASTE_(a, b) a##b

/// Where it is called, after torch_sm3/library.h: the one of this machine.
#if defined(__x86_64__)
#define TORCH_SM3_CHOOSE_KERNEL(name)                                   \
  (::torch_sm3::cpu_capability() == ::torch_sm3::CpuCapability::kAvx512 \
       ? name##_avx512                                                  \
   : ::torch_sm3::cpu_capability() == ::torch_sm3::CpuCapability::kAvx2 \
       ? name##_avx2                                                    \
       : name##_scalar)
#else
#define TORCH_SM3_CHOOSE_KERNEL(name) name##_scalar
#endif
