// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What the ranks compare besides the header: the code that they run, and the
/// results.

#include "adasum_plan.h"
#include "adasum_transport.h"

#include <ATen/core/Tensor.h>

#include <string>

namespace torch_sm3::distributed {

/// RuntimeError on all ranks that names ranks and layers, unless all hold the
/// same bits.
///
/// \param result 1-D, the layers of the plan
void check_hashes(
    Transport& ranks,
    const Plan& plan,
    const at::Tensor& result,
    const std::string& what);

/// What the ranks found out about each other.
struct Fingerprint {
  /// All ranks compute the same bits on the CPU and on other devices.
  bool alike_on_cpu = true, alike_elsewhere = true;
  int local_world_size = 0; ///< ranks per machine, if it is equal on all
};

/// Compares build, instruction set and ranks per machine; collective.
///
/// \param local_world_size of this rank, 0 if unknown
Fingerprint compare_fingerprints(
    Transport& ranks,
    int local_world_size,
    const std::string& what);

} // namespace torch_sm3::distributed
