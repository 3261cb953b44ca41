// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Which buffers a module changes, found out once for each pattern of training
/// flags. Kept beside the modules, because nothing may be added to them.

#include <scripted.h>

#include <optional>
#include <vector>

namespace torch_sm3::reversible {

/// Returns for each buffer whether F changes it, or nothing if it has not run
/// with these flags.
std::optional<std::vector<bool>> learned_buffers(
    const ObjectPtr& module,
    const std::vector<bool>& flags,
    size_t buffers);

/// Remembers for each buffer whether F changes it.
void learn_buffers(
    const ObjectPtr& module,
    const std::vector<bool>& flags,
    std::vector<bool> changed);

} // namespace torch_sm3::reversible
