// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Marks what libtorch_sm3.so shows to the outside; everything else is hidden.
#define TORCH_SM3_API __attribute__((visibility("default")))

namespace torch_sm3 {

/// Says what the library was built from, as one JSON object.
///
/// \return a string that lives as long as the library.
TORCH_SM3_API const char* build_info() noexcept;

namespace detail {
// Linkers run with --as-needed and drop a library that a program names but
// never calls, and with it every operator. This reference, kept by `used`, is
// such a call in each file that includes any header of ours.
[[gnu::used]] inline const auto kAnchor = &build_info;
} // namespace detail

} // namespace torch_sm3
