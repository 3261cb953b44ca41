// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Covers: which elements of a parameter share a number.

#include <c10/core/SymIntArrayRef.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace torch_sm3 {

/// The elements in logical order, seen as `view`, and the groups of view axes
/// that keep one accumulator each.
struct SM3Cover {
  std::vector<c10::SymInt> view;
  std::vector<uint64_t> groups; ///< bit a stands for axis a of the view

  /// Shape of accumulator `group`, at least one-dimensional.
  std::vector<c10::SymInt> shape(size_t group) const;
  /// Elements of the view.
  c10::SymInt numel() const;
};

/// The cover of a shape that the user said nothing about: one vector for each
/// dimension that is not 1, or one number per element where that is not larger.
///
/// \param standard do so for all matrices, even 2 x 2
SM3Cover sm3_automatic_cover(c10::SymIntArrayRef sizes, bool standard);

/// Reads the argument `covers` of `op`: per parameter rank, view, number of
/// groups, one mask per group; or -1. Empty: nothing for any parameter.
///
/// \return one cover per parameter, or none where it is automatic
std::vector<std::optional<SM3Cover>>
sm3_decode_covers(const char* op, c10::IntArrayRef covers, size_t params);

} // namespace torch_sm3
