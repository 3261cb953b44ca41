// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace torch_sm3::pipeline {

// The storages that one microbatch of one stage made or was given, as long as
// they live. Each counts once, whoever holds it. The references are weak, so no
// other storage can take the place of one that is gone.
class Account {
 public:
  void add(const at::Tensor& tensor);
  // No longer counts what is not an activation, such as a weight's gradient.
  void drop(const c10::StorageImpl* storage) {
    storages_.erase(storage);
  }
  // Whether a storage counted when `refresh` ran, or was added since.
  bool knows(const c10::StorageImpl* storage) const {
    return storages_.count(storage) > 0;
  }
  // Bytes of one that lives, else 0.
  int64_t bytes_of(const c10::StorageImpl* storage) const;
  // Forgets the dead and returns the bytes of the others.
  int64_t refresh();
  // As `refresh` found them.
  int64_t bytes() const {
    return bytes_;
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  std::unordered_map<const c10::StorageImpl*, Weak> storages_;
  int64_t bytes_ = 0;
};

// Sees the results of every operator that runs between `open` and `close`, in
// this thread and in those that autograd runs for it, and keeps new storages in
// an account. What an operator makes and drops inside is not seen.
class StorageRecorder {
 public:
  StorageRecorder() = default;
  ~StorageRecorder();
  StorageRecorder(const StorageRecorder&) = delete;
  StorageRecorder& operator=(const StorageRecorder&) = delete;

  // `before` is what counts besides the account.
  void open(Account* account, int64_t before);
  void close();
  // Most bytes since `open`, those before included.
  int64_t peak() const {
    return peak_;
  }

  void
  saw(const at::RecordFunction& call,
      const std::vector<const c10::StorageImpl*>& given);

 private:
  std::mutex mutex_;
  Account* account_ = nullptr;
  int64_t before_ = 0;
  int64_t peak_ = 0;
  // At least what lives: what has died since it was last counted is in it.
  int64_t bound_ = 0;
  at::CallbackHandle handle_ = 0;
};

} // namespace torch_sm3::pipeline
