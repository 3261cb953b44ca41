// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Futures on their way to Python.

#include "adasum_future_type.h"

#include <ATen/core/ivalue.h>

#include <condition_variable>
#include <exception>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace torch_sm3::distributed {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// Completes futures on the worker's thread without Python's lock.
///
/// Whoever lets go of a future last lets go of the Python object in it, and
/// that takes the lock. The worker must not wait for it, so it never owns a
/// future: a thread of its own does, until each has been delivered.
class Deliveries {
 public:
  /// A finished future with the object, and the future that will hold it.
  struct Delivery {
    FuturePtr value, result;
    bool delivered = false;
  };

  Deliveries();
  Deliveries(const Deliveries&) = delete;
  Deliveries& operator=(const Deliveries&) = delete;
  ~Deliveries();

  /// Keeps two futures; the address is good until `finish` or `forget`.
  Delivery* add(FuturePtr value, FuturePtr result);

  /// Completes the result, with the error if there is one.
  ///
  /// \param storages memory that the value stands for
  void finish(
      Delivery* delivery,
      const std::exception_ptr& error,
      std::vector<WeakStorage> storages);

  /// Gives up futures that will not be finished.
  void forget(Delivery* delivery);

  /// Ends the thread once it has let go of all that was delivered. Call it
  /// without Python's lock.
  void close();

 private:
  struct Shelf {
    std::mutex mutex;
    std::condition_variable wake;
    std::list<Delivery> all;
    bool delivered = false;
    bool closing = false;

    void let_go();
    void end();
  };

  const std::shared_ptr<Shelf> shelf_;
  std::thread thread_;
};

} // namespace torch_sm3::distributed
