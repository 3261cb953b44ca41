// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Checks shared by the CPU and CUDA kernels of the Adasum operators.

#include "adasum_math.h"
#include "scalar_math.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <string_view>

namespace torch_sm3::distributed {

/// Maps a dtype; TypeError naming `op` and `argument` for any other.
ScalarKind
scalar_kind(c10::ScalarType dtype, const char* op, const char* argument);

/// Parses "tree", "psum", "mean" or "sum"; ValueError otherwise.
Mode parse_mode(std::string_view mode, const char* op);

void check_scale(double scale, const char* op);
void check_sizes(c10::IntArrayRef sizes, int64_t numel, const char* op);
void check_pair(
    const at::Tensor& a,
    const at::Tensor& b,
    c10::IntArrayRef sizes,
    double weight_a,
    double weight_b);
void check_stack(const at::Tensor& stack, const char* op);
void check_gram(const at::Tensor& gram);
void check_combine(
    const at::Tensor& stack,
    const at::Tensor& coefficients,
    c10::IntArrayRef sizes);

} // namespace torch_sm3::distributed
