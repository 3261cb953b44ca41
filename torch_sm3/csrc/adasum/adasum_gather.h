// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The algorithms "pair" and "gather": every rank receives the leaves of all
/// ranks and computes the whole result with the same code, hence with the same
/// bits.

#include "adasum_algorithms.h"

namespace torch_sm3::distributed {

void run_gather(const Job& job);

} // namespace torch_sm3::distributed
