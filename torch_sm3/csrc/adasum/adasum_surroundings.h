// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// What of the submitting thread holds in the worker's as well.

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cfenv>
#include <memory>

namespace torch_sm3::distributed {

/// The floating-point environment (flushed subnormals) and who listens to
/// allocations (profiler, memory meter) of the thread that makes this.
///
/// Not all of torch's thread-local state: that may hold Python objects, and to
/// let go of one takes Python's lock.
class Surroundings {
 public:
  Surroundings() : listener_(c10::ThreadLocalDebugInfo::current()) {
    std::fegetenv(&arithmetic_);
  }

  /// Makes them those of the current thread, for a while.
  class Guard {
   public:
    explicit Guard(const Surroundings& surroundings)
        : listener_(surroundings.listener_) {
      std::fegetenv(&before_);
      std::fesetenv(&surroundings.arithmetic_);
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    ~Guard() {
      std::fesetenv(&before_);
    }

   private:
    const c10::DebugInfoGuard listener_;
    std::fenv_t before_;
  };

 private:
  std::shared_ptr<c10::ThreadLocalDebugInfo> listener_;
  std::fenv_t arithmetic_;
};

} // namespace torch_sm3::distributed
