// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>

#include <cstdint>
#include <string_view>

/// \file
/// How one call rebuilds its streams.

namespace torch_sm3::reversible {

/// What makes rebuilt streams equal the streams of the first run bit for bit.
enum class Exact : uint8_t {
  kNone,   ///< nothing: they differ by rounding
  kGrid,   ///< streams and what is added lie on a grid of steps 2^-grid_bits
  kSidecar ///< the rounding errors are kept, about two bits for each number
};

/// What happens to a step that cannot be rebuilt exactly.
enum class Overflow : uint8_t {
  kStore, ///< its input is kept
  kRaise  ///< ValueError
};

/// Options of one call.
struct CallOptions {
  bool allow_drift = false; ///< many additions to 16-bit streams are permitted
  Exact exact = Exact::kNone;
  int64_t grid_bits = 16; ///< from 0 to 23, to 52 for float64 streams
  Overflow overflow = Overflow::kStore;
};

/// \param op   who asks, for the message
/// \param name "none", "grid" or "sidecar"; else a ValueError
TORCH_SM3_API Exact exact_of(const char* op, std::string_view name);

/// \param op   who asks, for the message
/// \param name "store" or "raise"; else a ValueError
TORCH_SM3_API Overflow overflow_of(const char* op, std::string_view name);

/// Checks the numbers among the options.
TORCH_SM3_API void check_options(const char* op, const CallOptions& options);

} // namespace torch_sm3::reversible
