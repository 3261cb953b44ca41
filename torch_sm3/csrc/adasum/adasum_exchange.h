// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Requests to combine buckets, worked through one at a time.

#include "adasum_algorithms.h"
#include "adasum_plan.h"
#include "adasum_transport.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torch_sm3::distributed {

/// One bucket, or the tensors of one call.
struct Request {
  /// Tensors of one dtype on one device; replaced by the result.
  std::vector<at::Tensor> tensors;
  std::shared_ptr<const Plan> plan;
  /// Compare a header with all ranks before data moves.
  bool check = true;
  /// Free the scratch memory afterwards.
  bool release = false;
  /// Name of the operation and its part, for errors.
  std::string what;
};

/// Throws on what can be refused without asking other ranks.
void check_request(const Request& request, const char* op);

/// Runs requests over one transport, one at a time, in the same order on all
/// ranks.
class Exchange {
 public:
  /// \param transport used by this object only, or by a caller that keeps order
  explicit Exchange(std::unique_ptr<Transport> transport);

  /// Compares library build and instruction set with all ranks: only equal code
  /// gives equal bits. ValueError on all ranks if any differs.
  void check_fingerprint(const char* op);

  /// Replaces the tensors of the request; blocks.
  void run(const Request& request);

  Transport& transport() {
    return *transport_;
  }

 private:
  void check_header(
      const Request& request,
      Algorithm algorithm,
      const at::Tensor& flat);
  void reduce(const Request& request, at::Tensor flat);

  const std::unique_ptr<Transport> transport_;
  Scratch scratch_;
  int64_t sequence_ = 0;
};

} // namespace torch_sm3::distributed
