// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What is known of scripted modules, kept beside them, because nothing may be
/// added to them.

#include <function.h>
#include <scripted.h>

#include <memory>

namespace torch_sm3::reversible {

/// Returns what is known of a module; the same for as long as it lives.
std::shared_ptr<Learned> learned_of(const ObjectPtr& module);

} // namespace torch_sm3::reversible
