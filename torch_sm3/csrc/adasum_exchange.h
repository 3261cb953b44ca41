// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The algorithm "gather": every rank receives the leaves of all ranks and
/// computes the whole result with the same code, hence with the same bits.

#include "adasum_transport.h"

#include <torch_sm3/adasum_mode.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_sm3::distributed {

/// One bucket, or the tensors of one call.
struct Request {
  /// Tensors of one dtype on the CPU; replaced by the result.
  std::vector<at::Tensor> tensors;
  /// Elements of each layer, over all tensors in order.
  std::vector<int64_t> sizes;
  Mode mode = Mode::tree;
  double scale = 1.0;
  /// Compare a header with all ranks before data moves.
  bool check = true;
  /// Free the scratch memory afterwards.
  bool release = false;
  /// Name of the operation and its part, for errors.
  std::string what;
};

/// Throws on what can be refused without asking other ranks.
void check_request(const Request& request, const char* op);

/// Runs requests over one process group, one at a time, in the same order on
/// all ranks.
class Exchange {
 public:
  /// \param group   used by this object only, or by a caller that keeps order
  /// \param timeout longest wait for one message
  Exchange(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      std::chrono::milliseconds timeout);

  /// Compares library build and instruction set with all ranks: only equal code
  /// gives equal bits. ValueError on all ranks if any differs.
  void check_fingerprint(const char* op);

  /// Replaces the tensors of the request; blocks.
  void run(const Request& request);

  Transport& transport() {
    return transport_;
  }

 private:
  /// A run of whole layers, exchanged in one message per peer.
  struct Window {
    c10::IntArrayRef sizes;
    at::Tensor own;
    std::vector<at::Tensor> rows;
    Transport::Posted posted;
  };

  void check_header(const Request& request, const at::Tensor& flat);
  void reduce(const Request& request, at::Tensor flat);
  void gather(const Request& request, const at::Tensor& flat);
  std::vector<Window>
  cut_into_windows(const Request& request, const at::Tensor& flat) const;
  void
  post(const Request& request, Window& window, size_t index, uint64_t call);
  void compute(const Request& request, const Window& window) const;

  Transport transport_;
  int64_t sequence_ = 0;
  // Two sets of buffers for the other ranks' leaves: one window arrives while
  // another one is computed.
  std::vector<at::Tensor> scratch_[2];
};

} // namespace torch_sm3::distributed
