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

/// The same for leaves, which may be complex as well.
void check_leaf_dtype(
    c10::ScalarType dtype,
    const char* op,
    const char* argument);

/// Parses "tree", "psum", "mean" or "sum"; ValueError otherwise.
Mode parse_mode(std::string_view mode, const char* op);

/// Parses "mean" or "adasum"; ValueError otherwise.
Inner parse_inner(std::string_view inner, const char* op);

/// ValueError for nodes that are trees themselves under psum.
void check_inner(Mode mode, Inner inner, const char* op);

/// float64 or float32; TypeError otherwise.
Accumulate
parse_accumulate(std::optional<c10::ScalarType> dtype, const char* op);

/// What `adasum_combine` returns: that of the stack, or a given one.
c10::ScalarType
result_dtype(const at::Tensor& stack, std::optional<c10::ScalarType> dtype);

void check_scale(double scale, const char* op);
void check_sizes(c10::IntArrayRef sizes, int64_t numel, const char* op);
void check_pair(
    const at::Tensor& a,
    const at::Tensor& b,
    double weight_a,
    double weight_b);
void check_same_shape(const at::Tensor& a, const at::Tensor& b);
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

void check_combine(
    const at::Tensor& stack,
    const at::Tensor& coefficients,
    c10::IntArrayRef sizes);

// The operators on any device.

at::Tensor pair_of(
    const at::Tensor& a,
    const at::Tensor& b,
    c10::IntArrayRef sizes,
    double weight_a,
    double weight_b);

at::Tensor gram_of_stack(
    const at::Tensor& stack,
    c10::IntArrayRef sizes,
    std::optional<c10::ScalarType> accumulate_dtype);

at::Tensor coefficients_of_gram(
    const at::Tensor& gram,
    std::string_view mode,
    const std::optional<at::Tensor>& weights,
    c10::OptionalArrayRef<int64_t> nodes,
    std::string_view inner,
    double scale);

at::Tensor combine_stack(
    const at::Tensor& stack,
    const at::Tensor& coefficients,
    c10::IntArrayRef sizes,
    std::optional<c10::ScalarType> dtype);

} // namespace torch_sm3::distributed
