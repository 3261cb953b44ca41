// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/costs.h>

#include <cstdint>
#include <optional>

namespace torch_sm3::pipeline {

/// Costs of the stages of a pipeline with `chunks` per rank.
///
/// \param costs  of one rank's whole share (one entry), or of p * n stages
/// \param ranks  number of ranks
/// \param chunks stages per rank wanted
/// \return nothing if `chunks` does not divide n
std::optional<Costs>
regroup(const Costs& costs, uint32_t ranks, uint32_t chunks);

} // namespace torch_sm3::pipeline
