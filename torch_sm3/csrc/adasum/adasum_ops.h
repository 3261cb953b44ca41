// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Checks of the Adasum operators, and what their devices share.

#include "adasum_compute.h"
#include "scalar_math.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

#include <optional>
#include <string_view>
#include <vector>

namespace torch_sm3::distributed {

/// Maps a dtype; TypeError naming `op` and `argument` for any other.
ScalarKind
scalar_kind(c10::ScalarType dtype, const char* op, const char* argument);

/// Parses "tree", "psum", "mean" or "sum"; ValueError otherwise.
Mode parse_mode(std::string_view mode, const char* op);

/// Parses "mean" or "adasum"; ValueError otherwise.
Inner parse_inner(std::string_view inner, const char* op);

/// ValueError for nodes that are trees themselves under psum.
void check_inner(Mode mode, Inner inner, const char* op);

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

/// Weights of p ranks: finite, >= 0, and not all 0.
void check_weights(const std::vector<double>& weights, const char* op);
void check_weights(const at::Tensor& weights, const c10::SymInt& p);

/// The rule of `adasum_coefficients`, its weights left out.
Rule parse_rule(
    const at::Tensor& gram,
    std::string_view mode,
    c10::OptionalArrayRef<int64_t> nodes,
    std::string_view inner,
    double scale);

/// `adasum_coefficients` on any device.
at::Tensor coefficients_of_gram(
    const at::Tensor& gram,
    std::string_view mode,
    const std::optional<at::Tensor>& weights,
    c10::OptionalArrayRef<int64_t> nodes,
    std::string_view inner,
    double scale);

void check_combine(
    const at::Tensor& stack,
    const at::Tensor& coefficients,
    c10::IntArrayRef sizes);

} // namespace torch_sm3::distributed
