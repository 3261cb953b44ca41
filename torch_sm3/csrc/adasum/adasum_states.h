// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What combined ranks take along when they become one leaf of the next level:
/// float64 (weight, S, active leaves), see `Coefficients::roots`.

#include "adasum_compute.h"

namespace torch_sm3::distributed {

/// The states of runs of ranks of which some layers got the mean.
///
/// \param found  [layers, 3], of the layers that were combined by projection
/// \param gram   [layers, p, p]
/// \param shifts int32 [layers, p], or undefined
at::Tensor states_with_means(
    const at::Tensor& found,
    const at::Tensor& gram,
    const Rule& rule,
    const at::Tensor& means,
    const at::Tensor& shifts);

/// States of which those that cancel below what the sums can resolve are absent
/// (weight 0), as a node of the tree would be. Layers that get the mean keep
/// all of theirs.
///
/// \param states [layers, p, 3]
at::Tensor resolved_states(
    const at::Tensor& states,
    const at::Tensor& gram,
    const Rule& rule,
    const at::Tensor& means,
    const at::Tensor& shifts);

} // namespace torch_sm3::distributed
