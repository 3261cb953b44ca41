// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Layers whose inner products left the range that one pass can resolve.

#include "adasum_sums.h"

#include <functional>

namespace torch_sm3::distributed {

/// Gives the leaves of a piece, exchanging them once more if they were dropped.
using RowsOfPiece = std::function<const Rows&(size_t)>;

/// The rows of a piece that belong to a run of tiles within it, scaled.
///
/// \param begin  first tile of the rows
/// \param shifts int32 [L, p], or undefined
Rows rows_within(
    const Layout& layout,
    const Rows& rows,
    int64_t begin,
    Range tiles,
    const at::Tensor& shifts);

/// Repeats what `need_second_pass` says of a run of layers: exponents of the
/// leaves' largest elements, inner products of leaves scaled by them.
///
/// On a transport whose waits leave the host in the dark all layers are
/// repeated, and each takes what it needs.
///
/// \param pieces that have tiles of the layers
/// \param turn   names this pass among those of the stage
/// \param gram   [L, p, p]; the layers' matrices are replaced
/// \param shifts int32 [L, p], zeros; the layers' shifts are written
/// \return       whether any layer was repeated
bool second_pass(
    const StageContext& context,
    Range layers,
    Range pieces,
    int64_t turn,
    const RowsOfPiece& rows_of,
    const at::Tensor& gram,
    const at::Tensor& shifts);

} // namespace torch_sm3::distributed
