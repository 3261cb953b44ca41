// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Discrete choices of a function that is run twice: its second run takes what
/// the first one remembered instead of choosing again.
///
/// \code
/// const auto best = std::get<1>(scores.topk(2));
/// const auto index = torch_sm3::reversible::remember(best);
/// \endcode

#include <torch_sm3/export.h>

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace torch_sm3::reversible {

/// Returns `x`, or, where a reversible block runs its function again, the value
/// that `x` had in the first run. The gradient passes to `x` unchanged.
///
/// \param x   value, usually an index or a mask; bool is kept in bits
/// \param key name of the value; needed inside a checkpointed region, whose
///            second run may come in another order. Values with equal names
///            keep their order outside such regions
TORCH_SM3_API at::Tensor
remember(const at::Tensor& x, const std::string& key = "");

/// What `remember` does in this thread.
enum class MemoryMode : uint8_t {
  kRecord, ///< keep the values
  kRecall, ///< return the kept values in order, or by key
  kVjp,    ///< return kept values by key only: checkpointed regions run again
  kOff     ///< return `x`; hides the outer memory
};

/// \param name "record", "recall", "vjp" or "off"; else a ValueError
TORCH_SM3_API MemoryMode memory_mode(std::string_view name);

/// The values that one run of one function remembered.
///
/// A thread's current memory is the one that it entered last. While that one
/// records, the one before it sees the values too, before it. Threads may enter
/// one memory at the same time to recall, each with its own place in the order.
class TORCH_SM3_API ReversibleMemory : public torch::CustomClassHolder {
 public:
  /// How messages call the function.
  std::string name = "F";

  /// Makes this memory the current one of this thread.
  ///
  /// \param mode what `remember` does
  void enter(MemoryMode mode);

  /// Makes the memory before this one the current one again.
  void leave();

  /// Throws unless everything recorded was recalled since `enter`; to be called
  /// before `leave`.
  void finish() const;

  /// Returns the recorded values, packed, in their order: to be saved. One that
  /// was written in place since is a RuntimeError.
  std::vector<at::Tensor> tensors() const;

  /// Forgets the values, but not their number, keys, shapes and dtypes.
  void clear_tensors();

  /// Takes back the values that `tensors` gave.
  ///
  /// \param tensors as many tensors, in the same order
  void load(at::TensorList tensors);

  /// How many values were recorded.
  size_t size() const;

 private:
  friend struct MemoryFrame;

  struct Entry {
    std::string key;
    at::ScalarType type;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    int64_t version;
  };

  mutable std::mutex mutex_; // guards what follows; not held while F runs
  std::vector<Entry> entries_;
  std::vector<at::Tensor> values_;
};

} // namespace torch_sm3::reversible
