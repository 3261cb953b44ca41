// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What the CUDA kernels of Adasum read besides elements: arrays on the device.

#include <cstdint>

namespace torch_sm3::distributed::cuda {

/// A run of tiles and the layers of the layout.
struct TileTable {
  const int64_t* start; ///< T: first element, from the beginning of the run
  const int64_t* size;  ///< T
  const int64_t* layer; ///< T
  /// first tile of each layer and the end of the last one, of a run of layers
  const int64_t* first;
  int64_t tiles;
};

/// The leaves of a run of tiles.
struct LeafTable {
  const void* const* rows; ///< p
  const double* scales;    ///< [T, p], or null: all 1
  int64_t p;
};

} // namespace torch_sm3::distributed::cuda
