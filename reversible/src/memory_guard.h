// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/reversible/remember.h>

#include <vector>

namespace torch_sm3::reversible {

/// Makes a memory this thread's current one for as long as the guard lives.
class MemoryGuard {
 public:
  /// \param values to recall: what `memory.tensors()` gave
  MemoryGuard(
      const c10::intrusive_ptr<ReversibleMemory>& memory,
      MemoryMode mode,
      std::vector<at::Tensor> values = {});
  ~MemoryGuard();
  MemoryGuard(const MemoryGuard&) = delete;
  MemoryGuard& operator=(const MemoryGuard&) = delete;

 private:
  size_t depth_;
};

} // namespace torch_sm3::reversible
