// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/Exception.h>

/// \file
/// Argument checks with the one wording that this project uses:
/// `op: expected <what>, but got <value> (argument 'name')`.

/// Throws `ValueError` unless `condition` holds.
///
/// \param condition what must be true
/// \param op        name of the operator or class, a string literal
/// \param argument  name of the argument, a string literal
/// \param expected  what was expected: one value or a `c10::str(...)`
/// \param ...       what came instead
#define TORCH_SM3_CHECK_VALUE(condition, op, argument, expected, ...) \
  TORCH_CHECK_VALUE(                                                  \
      condition,                                                      \
      op ": expected ",                                               \
      expected,                                                       \
      ", but got ",                                                   \
      __VA_ARGS__,                                                    \
      " (argument '" argument "')")

/// Throws `TypeError` unless `condition` holds; see TORCH_SM3_CHECK_VALUE.
#define TORCH_SM3_CHECK_TYPE(condition, op, argument, expected, ...) \
  TORCH_CHECK_TYPE(                                                  \
      condition,                                                     \
      op ": expected ",                                              \
      expected,                                                      \
      ", but got ",                                                  \
      __VA_ARGS__,                                                   \
      " (argument '" argument "')")
