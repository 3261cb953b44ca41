// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Option values as the words that users write. Each parser throws a ValueError
/// (a TypeError for dtypes) that lists the legal ones.

#include "adasum_plan.h"

#include <optional>
#include <string_view>

namespace torch_sm3::distributed {

Algorithm parse_algorithm(std::string_view algorithm, const char* op);
Accumulate parse_accumulate(std::string_view dtype, const char* op);
Check parse_check(std::string_view check, const char* op);
/// \param dtype empty: none
std::optional<c10::ScalarType>
parse_wire(std::string_view dtype, const char* op);

const char* name_of(Mode mode);
const char* name_of(Algorithm algorithm);

} // namespace torch_sm3::distributed
