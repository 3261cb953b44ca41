// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace torch_sm3::reversible {

/// Options of `reversible_begin`.
struct CallOptions {
  bool allow_drift = false; ///< many additions to 16-bit streams are permitted
};

/// Reads the options from a JSON object.
///
/// \param text "" or an object; keys that are not known are a ValueError
CallOptions parse_call_options(const std::string& text);

} // namespace torch_sm3::reversible
