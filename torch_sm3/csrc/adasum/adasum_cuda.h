// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Launches of the CUDA kernels: raw pointers on the device and a stream.

#include "adasum_tables.h"
#include "scalar_math.h"

#include <cstdint>

struct CUstream_st;

namespace torch_sm3::distributed::cuda {

using Stream = CUstream_st*;

/// Writes the packed inner products of each tile, [T, p (p + 1) / 2].
///
/// \param float32 add the products of a strip in float32; not for float64
/// \param flags   layers that are computed, or null: all
void launch_dots(
    const LeafTable& leaves,
    const TileTable& tiles,
    ScalarKind kind,
    bool float32,
    const bool* flags,
    double* partial,
    Stream stream);

/// Writes the Gram matrices [layers, p, p].
void launch_add_tiles(
    const double* partial,
    int64_t layers,
    int64_t p,
    const TileTable& tiles,
    double* gram,
    Stream stream);

/// Writes the sum of the leaves with their coefficients, [L, p].
void launch_combine(
    const LeafTable& leaves,
    const TileTable& tiles,
    ScalarKind from,
    const double* coefficients,
    void* out,
    ScalarKind to,
    Stream stream);

/// Writes each tile times its power of two.
///
/// \param scales [T], or null: all 1
void launch_rescale(
    const void* in,
    ScalarKind from,
    const TileTable& tiles,
    const double* scales,
    void* out,
    ScalarKind to,
    Stream stream);

/// Writes the sum of the leaves, or the only leaf itself, as float16 and the
/// tiles' powers of two, [T].
///
/// \param coefficients [L, p], or null
void launch_encode(
    const LeafTable& leaves,
    const TileTable& tiles,
    ScalarKind from,
    const double* coefficients,
    void* out,
    double* scales,
    Stream stream);

/// Writes the exponents of the rows' largest elements, [T, p].
void launch_exponents(
    const LeafTable& leaves,
    const TileTable& tiles,
    ScalarKind kind,
    const bool* flags,
    int32_t* exponents,
    Stream stream);

/// Writes the shifts [layers, p] of a run of layers.
void launch_shifts(
    const int32_t* exponents,
    const TileTable& tiles,
    int64_t layers,
    int64_t p,
    int32_t* shifts,
    Stream stream);

/// Writes the scales [T, p] of the second pass.
///
/// \param before [T, p], or null
void launch_second_scales(
    const double* before,
    const int32_t* shifts,
    const TileTable& tiles,
    int64_t p,
    double* scales,
    Stream stream);

/// Writes which layers take a second pass, [layers].
void launch_second_pass(
    const double* gram,
    int64_t layers,
    int64_t p,
    bool float32,
    bool* flags,
    Stream stream);

/// Writes the hash of a buffer.
void launch_hash(const void* data, int64_t bytes, int64_t* hash, Stream stream);

} // namespace torch_sm3::distributed::cuda
