// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Which accumulators a sparse gradient moves, and how.

#include <sm3_geometry.h>

#include <vector>

namespace torch_sm3 {

/// One accumulator that takes part.
struct SM3SparseGroup {
  size_t index;  ///< in the geometry
  bool alone;    ///< each set lies in one named row
  bool assigned; ///< touched sets were seen whole; others are only raised
};

/// \param rows        the first size of the parameter
/// \param sparse_dims dimensions that the gradient names by indices
std::vector<SM3SparseGroup> sm3_sparse_groups(
    const SM3Geometry& geometry,
    const SM3Hyperparameters& hyperparameters,
    int64_t rows,
    int64_t sparse_dims);

} // namespace torch_sm3
