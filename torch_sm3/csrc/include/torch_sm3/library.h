// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>

namespace torch_sm3 {

/// Instruction sets that the CPU kernels are compiled for, weakest first.
enum class CpuCapability { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

/// Tells which instruction set the CPU kernels use on this machine.
///
/// Found once, at the first call. The environment variable
/// `TORCH_SM3_CPU_CAPABILITY` (`scalar`, `avx2`, `avx512`) lowers it, for
/// tests.
TORCH_SM3_API CpuCapability cpu_capability();

} // namespace torch_sm3
