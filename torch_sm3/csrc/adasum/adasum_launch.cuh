// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What the launches of Adasum's kernels share.

#include "scalar_math.h"

#include <cstdint>

namespace torch_sm3::distributed::cuda {

/// Calls `function` with a value of the element type.
template <class Function>
void with_type(ScalarKind kind, const Function& function) {
  switch (kind) {
    case ScalarKind::kFloat32:
      return function(float{});
    case ScalarKind::kFloat64:
      return function(double{});
    case ScalarKind::kFloat16:
      return function(Half{});
    case ScalarKind::kBFloat16:
      return function(BFloat16{});
  }
}

inline unsigned blocks_for(int64_t count, int threads) {
  return static_cast<unsigned>((count + threads - 1) / threads);
}

} // namespace torch_sm3::distributed::cuda
