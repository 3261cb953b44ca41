// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Adasum as a communication hook of torch's gradient reducer, for programs
/// that own a `c10d::Reducer`; no Python anywhere.

#include <torch_sm3/adasum_options.h>
#include <torch_sm3/export.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <cstdint>
#include <functional>
#include <memory>

namespace torch_sm3::distributed {

/// Options of AdasumCommHook.
struct AdasumHookOptions : AdasumOptions {
  /// Plain mean in the first iterations.
  int64_t warmup_steps = 0;
  /// Parameters whose gradients get the plain mean; empty: none do.
  std::function<bool(const at::Tensor& parameter)> exclude;
};

/// Combines the gradients of each bucket over all ranks while backward goes on.
///
/// ```cpp
/// reducer.register_comm_hook(std::make_unique<AdasumCommHook>(own_group));
/// ```
///
/// Each parameter is a layer of its own. A bucket must not be divided by the
/// number of ranks before. A failure is the error of this and all later
/// futures.
class TORCH_SM3_API AdasumCommHook : public c10d::CommHookInterface {
 public:
  /// Collective over the group.
  ///
  /// \param group   the ranks; used by this hook only, from a thread of its own
  /// \param options equal on all ranks
  explicit AdasumCommHook(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      AdasumHookOptions options = {});
  /// Closes.
  ~AdasumCommHook() override;

  /// Returns at once.
  ///
  /// \return a future of the bucket's own buffer
  c10::intrusive_ptr<c10::ivalue::Future>
  runHook(c10d::GradBucket& bucket) override;
  at::Tensor parseHookResult(const c10::IValue& result) override;

  /// Iterations, that is last buckets, seen so far.
  int64_t step() const;

  /// Fails what is queued and ends the thread; may be called twice.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace torch_sm3::distributed
