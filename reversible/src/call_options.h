// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/reversible/options.h>

#include <string>

namespace torch_sm3::reversible {

/// Reads the options of `reversible_begin` from a JSON object.
///
/// \param text "" or an object; keys that are not known are a ValueError
CallOptions parse_call_options(const std::string& text);

} // namespace torch_sm3::reversible
