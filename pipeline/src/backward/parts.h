// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What is known of single kinds of autograd nodes.

#include <torch/csrc/autograd/function.h>

namespace torch_sm3::pipeline {

/// Whether a node is one of torch's own, whose saved tensors and edges torch
/// alone decides; not a custom Function, in Python or C++.
bool is_built_in(const torch::autograd::Node& node);

/// Whether a node may be run once for its inputs and once for its weights, at
/// the price of one run: a matrix product, a convolution or an embedding, whose
/// saved tensors are plain. Those of a checkpointed region are not: to unpack
/// them is to recompute the region, and a second time to recompute it again.
bool runs_in_parts(const torch::autograd::Node& node);

/// Whether a node is of a kind that may run in parts, whatever it saved.
bool is_layer(const torch::autograd::Node& node);

/// Whether a node is an embedding: it reads a stage's data, but has no edge for
/// it.
bool is_embedding(const torch::autograd::Node& node);

/// Whether a node is known not to save its own result.
bool keeps_no_result(const torch::autograd::Node& node);

} // namespace torch_sm3::pipeline
