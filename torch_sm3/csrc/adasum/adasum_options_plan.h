// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "adasum_plan.h"

#include <torch_sm3/adasum_options.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace torch_sm3::distributed {

/// The plan of some layers with a C++ user's options.
///
/// \param sizes real numbers of each layer
/// \param means per layer: gets the mean instead; empty: none does
std::shared_ptr<const Plan> plan_of(
    const AdasumOptions& options,
    std::vector<int64_t> sizes,
    const char* op,
    std::vector<bool> means = {});

} // namespace torch_sm3::distributed
