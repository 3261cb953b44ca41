// SPDX-License-Identifier: Apache-2.0

/// \file
/// The one implementation of the CPU kernels, compiled once per instruction
/// set. The including file defines TORCH_SM3_ISA as its namespace. Functions
/// are `static` or templates of that namespace, and none of the standard
/// library is used: a shared inline function compiled for AVX-512 could be
/// linked into all callers.

#include "adasum_kernel.h"

#include "adasum_kernel_combine.h"
#include "adasum_kernel_dots.h"
#include "adasum_kernel_wire.h"

namespace torch_sm3::distributed::TORCH_SM3_ISA {

const AdasumKernels kAdasumKernels =
    {&dots, &combine, &largest, &rescale, &hash};

} // namespace torch_sm3::distributed::TORCH_SM3_ISA
