// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// From torch's dtypes to the element types of the kernels.

#include <scalar_math.h>

#include <c10/core/ScalarType.h>

namespace torch_sm3 {

/// True for float16, bfloat16, float32 and float64.
inline bool has_scalar_kind(c10::ScalarType type) {
  return type == c10::ScalarType::Float || type == c10::ScalarType::Double ||
         type == c10::ScalarType::Half || type == c10::ScalarType::BFloat16;
}

/// The kind of a dtype that has one; that of float32 for any other.
inline ScalarKind scalar_kind(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Double:
      return ScalarKind::kFloat64;
    case c10::ScalarType::Half:
      return ScalarKind::kFloat16;
    case c10::ScalarType::BFloat16:
      return ScalarKind::kBFloat16;
    default:
      return ScalarKind::kFloat32;
  }
}

} // namespace torch_sm3
