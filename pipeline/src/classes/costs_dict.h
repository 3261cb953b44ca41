// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/costs.h>

#include <ATen/core/Dict.h>

#include <string>
#include <vector>

namespace torch_sm3::pipeline {

/// Costs as Python and TorchScript hand them over: `F`, `I`, `W`, `B`, `pair`,
/// `recompute`, `reduce`, `optimizer`, `activation_bytes`, `released_at_input`,
/// `shared_bytes`, `boundary_bytes`, `transient_bytes` and `static_bytes` with
/// one value or one per stage; `latency`, `bandwidth`, `speed`, `tie` and
/// `route_bytes` as in `Costs`; `serial_links`, `jitter`, `seed` and
/// `optimizer_waits` with one value.
using CostsDict = c10::Dict<std::string, std::vector<double>>;

/// Reads costs; what is not given stays as it is by default.
///
/// \param given the values by name
/// \throws std::invalid_argument naming the value that is wrong
Costs costs_of(const CostsDict& given);

/// Writes what `costs_of` reads.
///
/// \param costs the costs
CostsDict dict_of(const Costs& costs);

} // namespace torch_sm3::pipeline
