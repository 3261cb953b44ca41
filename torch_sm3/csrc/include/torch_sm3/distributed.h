// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Adasum: combine the gradients of several ranks so that parallel gradients
/// are averaged and orthogonal ones are added (arXiv 2006.02924).

#include <torch_sm3/adasum_options.h>
#include <torch_sm3/export.h>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/OptionalArrayRef.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace c10d {
class ProcessGroup;
}

/// Combination of gradients across ranks.
namespace torch_sm3::distributed {

/// Applies the pair rule to each layer of two flat gradients.
///
/// \param a        gradient of the first rank, any shape
/// \param b        gradient of the second rank, like `a`
/// \param sizes    number of elements of each layer; they sum to `a.numel()`
/// \param weight_a number of ranks that `a` stands for
/// \param weight_b number of ranks that `b` stands for
/// \return a tensor like `a`
TORCH_SM3_API at::Tensor adasum_pair(
    const at::Tensor& a,
    const at::Tensor& b,
    c10::SymIntArrayRef sizes,
    double weight_a = 1.0,
    double weight_b = 1.0);

/// Computes the inner products of all leaves, layer by layer, in float64.
///
/// Products of float64 leaves are returned as they are, also where they
/// overflow or vanish; `adasum_pair` and the exchange scale such leaves.
///
/// \param stack            the flat gradients of p ranks, [p, N]; complex
///                         numbers count as pairs of reals
/// \param sizes            number of elements of each of L layers; they sum to
///                         N
/// \param accumulate_dtype of the sums inside blocks: float64, or float32 for
///                         devices with slow float64
/// \return [L, p, p]
TORCH_SM3_API at::Tensor adasum_gram(
    const at::Tensor& stack,
    c10::SymIntArrayRef sizes,
    std::optional<at::ScalarType> accumulate_dtype = std::nullopt);

/// Computes the coefficients c of the result sum_i c_i g_i of each layer.
///
/// \param gram    inner products, [L, p, p]
/// \param mode    "tree", "psum", "mean" or "sum"
/// \param weights weight of each rank, [p], 0: absent; all 1 if left out
/// \param nodes   ranks of each node, in order, that are combined first; they
///                sum to p
/// \param inner   how: "mean" or "adasum"
/// \param scale   factor of all coefficients
/// \return [L, p]
TORCH_SM3_API at::Tensor adasum_coefficients(
    const at::Tensor& gram,
    std::string_view mode = "tree",
    const std::optional<at::Tensor>& weights = std::nullopt,
    c10::OptionalArrayRef<int64_t> nodes = std::nullopt,
    std::string_view inner = "mean",
    double scale = 1.0);

/// Adds the leaves with their coefficients, in float64, rounded once.
///
/// \param stack        the flat gradients of p ranks, [p, N]
/// \param coefficients [L, p]
/// \param sizes        number of elements of each of L layers; they sum to N
/// \param dtype        of the result; by default that of the leaves
/// \return [N]
TORCH_SM3_API at::Tensor adasum_combine(
    const at::Tensor& stack,
    const at::Tensor& coefficients,
    c10::SymIntArrayRef sizes,
    std::optional<at::ScalarType> dtype = std::nullopt);

/// Replaces the tensors of every rank by their Adasum; each tensor is a layer.
///
/// Collective: every rank of the group calls it with tensors of equal sizes and
/// dtypes, and all end with the same bits. Blocks until the tensors are
/// replaced, at most for the timeout per message. On CUDA with NCCL it only
/// enqueues.
///
/// The messages go over `group` itself, so the call takes its place among the
/// group's other collectives, in the same order on all ranks. A program that
/// calls it beside others, from another thread, gives it a group of its own.
///
/// \param tensors float16, bfloat16, float32, float64 or complex tensors of any
///                strides, on the CPU or (where built) on CUDA
/// \param group   the ranks; rank order is part of the result
/// \param options see AdasumOptions
TORCH_SM3_API void adasum_all_reduce_(
    const std::vector<at::Tensor>& tensors,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const AdasumOptions& options = {});

} // namespace torch_sm3::distributed
