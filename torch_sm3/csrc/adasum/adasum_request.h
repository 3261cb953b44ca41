// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// A request to combine a bucket, and what can be refused without a message.

#include "adasum_plan.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace torch_sm3::distributed {

/// One bucket, or the tensors of one call.
struct Request {
  std::shared_ptr<const Plan> plan;
  /// Tensors of one dtype on one device.
  std::vector<at::Tensor> tensors;
  /// Take the result; empty: the tensors themselves are replaced.
  std::vector<at::Tensor> outputs;
  /// Plain mean by the backend, whatever the plan says: warm-up.
  bool mean = false;
  Check check = Check::layout;
  /// Keep what metrics are made from.
  bool metrics = false;
  /// Free the scratch memory afterwards.
  bool release = false;
  /// Name of the operation and its part, for errors.
  std::string what;
};

/// Throws on what can be refused without asking other ranks.
///
/// \param ranks number of ranks of the group
void check_request(const Request& request, int ranks, const char* op);

} // namespace torch_sm3::distributed
