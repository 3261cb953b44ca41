// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The functions of adasum_compute.h on the current stream of their tensors'
/// device. What they return is allocated by the caller here.

#include "adasum_compute.h"

namespace torch_sm3::distributed::on_cuda {

void dots_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    bool float32,
    const at::Tensor& flags,
    const at::Tensor& partial);

void add_tiles(
    const Layout& layout,
    Range layers,
    const at::Tensor& partial,
    const at::Tensor& gram);

void combine_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& coefficients,
    const at::Tensor& out);

/// Into float16 with scales.
///
/// \param coefficients undefined: the only row itself
void encode(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& coefficients,
    const Coded& out);

void rescale(
    const Layout& layout,
    Range tiles,
    const at::Tensor& in,
    const at::Tensor& scales,
    const at::Tensor& out);

void need_second_pass(
    const at::Tensor& gram,
    bool float32,
    const at::Tensor& flags);

void exponents_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& flags,
    const at::Tensor& exponents);

void shifts_of_layers(
    const Layout& layout,
    Range layers,
    const at::Tensor& exponents,
    const at::Tensor& shifts);

void scales_of_tiles(
    const Layout& layout,
    Range tiles,
    const Rows& rows,
    const at::Tensor& shifts,
    const at::Tensor& scales);

void hash_of(const at::Tensor& flat, const at::Tensor& hash);

} // namespace torch_sm3::distributed::on_cuda
