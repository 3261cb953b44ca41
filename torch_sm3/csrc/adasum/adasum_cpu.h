// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Adasum of whole buckets on the CPU: layers cut into tiles, tiles spread over
/// the threads of at::parallel_for.
///
/// Other threads compute in the floating-point environment of the calling one,
/// so that `torch.set_flush_denormal` holds for all tiles or for none.

#include "adasum_kernel.h"
#include "adasum_layout.h"

#include <c10/util/ArrayRef.h>

#include <vector>

namespace torch_sm3::distributed {

/// Leaves of equal length: one pointer per rank.
struct Leaves {
  const void* const* rows;
  int64_t p;
  ScalarKind kind;
  /// [T, p], powers of two by which the rows are multiplied; null: all 1.
  const double* scales = nullptr;
};

/// Sets the most threads that kernels called by this thread use, 0 for those
/// of at::parallel_for; returns what was set before.
int set_kernel_threads(int threads);

/// Writes the packed inner products of each tile, [T, p (p + 1) / 2].
///
/// \param float32 see AdasumKernels::dots
/// \param flags   [L], layers whose tiles are computed; null: all
void dots_cpu(
    const Leaves& leaves,
    const std::vector<Tile>& tiles,
    double* partial,
    bool float32 = false,
    const bool* flags = nullptr);

/// Adds the inner products of the tiles of each layer, in order, to Gram
/// matrices [L, p, p].
void add_tiles_cpu(
    const double* partial,
    c10::IntArrayRef tiles_of_layer,
    int64_t p,
    double* gram);

/// Writes the weighted sum of the leaves; `out` may be one of the rows.
///
/// \param kind of `out`
void combine_cpu(
    const Leaves& leaves,
    const double* coefficients,
    const std::vector<Tile>& tiles,
    void* out,
    ScalarKind kind);

/// Writes the weighted sum of the leaves as float16 and the tiles' powers of
/// two, [T].
void combine_float16_cpu(
    const Leaves& leaves,
    const double* coefficients,
    const std::vector<Tile>& tiles,
    void* out,
    double* scales);

/// Rounds each tile to float16 times a power of two, [T].
void encode_float16_cpu(
    const void* in,
    ScalarKind from,
    const std::vector<Tile>& tiles,
    void* out,
    double* scales);

/// Writes `scales[t] * in[e]`, rounded once.
///
/// \param scales [T], or null for all 1
void rescale_cpu(
    const void* in,
    ScalarKind from,
    const std::vector<Tile>& tiles,
    const double* scales,
    void* out,
    ScalarKind to);

/// Writes the exponents of the rows' largest elements, [T, p]; see
/// `exponents_of_tiles`.
void exponents_cpu(
    const Leaves& leaves,
    const std::vector<Tile>& tiles,
    const bool* flags,
    int32_t* exponents);

/// Adds up the hashes of all words of `bytes` bytes.
uint64_t hash_cpu(const void* data, int64_t bytes);

} // namespace torch_sm3::distributed
