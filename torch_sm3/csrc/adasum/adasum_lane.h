// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The side streams on which requests of other devices than the CPU run.

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <map>
#include <memory>
#include <optional>
#include <vector>

namespace torch_sm3::distributed {

/// One high-priority stream per device, used by one thread at a time.
class Lane {
 public:
  /// What a thread has enqueued on a device up to now; nothing for the CPU.
  struct Mark {
    c10::Device device = c10::kCPU;
    std::shared_ptr<c10::Event> event;
  };

  /// Makes the lane's stream the current one of this thread, for a while; what
  /// follows runs after what the mark stands for.
  class Scope {
   public:
    Scope(Lane& lane, const Mark& mark);

   private:
    std::optional<c10::StreamGuard> guard_;
  };

  /// Of the calling thread's current stream, on the device of a tensor.
  static Mark mark(const at::Tensor& tensor);

  /// Keeps the memory of tensors from being reused before the current stream
  /// is done with it.
  static void keep(const std::vector<at::Tensor>& tensors);

 private:
  c10::Stream stream_of(c10::Device device);

  std::map<c10::DeviceIndex, c10::Stream> streams_;
};

} // namespace torch_sm3::distributed
