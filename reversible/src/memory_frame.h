// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The memories that this thread has entered.

#include <torch_sm3/reversible/remember.h>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torch_sm3::reversible {

/// A memory that a thread has entered, and how far its recall has come.
struct MemoryFrame {
  using Entry = ReversibleMemory::Entry;

  c10::intrusive_ptr<ReversibleMemory> memory;
  MemoryMode mode;
  std::vector<Entry> entries = {}; // copies, so that no lock is needed later
  std::vector<at::Tensor> values = {};
  std::vector<bool> taken = {};

  void load();
  void load(std::vector<at::Tensor> kept);
  at::Tensor record(const at::Tensor& x, const std::string& key) const;
  at::Tensor recall(const at::Tensor& x, const std::string& key);

 private:
  size_t find(const std::string& key) const;
  void check(const Entry& entry, const at::Tensor& x, size_t index) const;
};

/// Returns this thread's frames, the current one last.
std::vector<MemoryFrame>& memory_frames();

/// Returns the version of a tensor; inference tensors have none.
int64_t version_of(const at::Tensor& tensor);

/// Returns "value 2" or "'route'", for messages.
std::string named(const std::string& key, size_t index);

} // namespace torch_sm3::reversible
