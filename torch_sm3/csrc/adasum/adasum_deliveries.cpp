// SPDX-License-Identifier: Apache-2.0
#include "adasum_deliveries.h"

#include <utility>

namespace torch_sm3::distributed {

void Deliveries::Shelf::let_go() {
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    wake.wait(lock, [this] { return closing || delivered; });
    std::list<Delivery> done;
    for (auto next = all.begin(); next != all.end();) {
      const auto one = next++;
      if (one->delivered) {
        done.splice(done.end(), all, one);
      }
    }
    delivered = false;
    const bool last = closing;
    lock.unlock();
    done.clear();
    if (last) {
      return;
    }
    lock.lock();
  }
}

void Deliveries::Shelf::end() {
  const std::lock_guard<std::mutex> lock(mutex);
  closing = true;
  wake.notify_all();
}

Deliveries::Deliveries()
    : shelf_(std::make_shared<Shelf>()),
      thread_([shelf = shelf_] { shelf->let_go(); }) {}

Deliveries::~Deliveries() {
  if (!thread_.joinable()) {
    return;
  }
  // Nobody has closed it, so the caller may hold Python's lock, for which the
  // thread may wait.
  shelf_->end();
  thread_.detach();
}

Deliveries::Delivery* Deliveries::add(FuturePtr value, FuturePtr result) {
  const std::lock_guard<std::mutex> lock(shelf_->mutex);
  return &shelf_->all.emplace_back(
      Delivery{std::move(value), std::move(result)});
}

void Deliveries::finish(
    Delivery* delivery,
    const std::exception_ptr& error,
    std::vector<WeakStorage> storages) {
  c10::ivalue::Future& result = *delivery->result;
  if (error != nullptr) {
    result.setError(error);
  } else {
    result.markCompleted(delivery->value->value(), std::move(storages));
  }
  forget(delivery);
}

void Deliveries::forget(Delivery* delivery) {
  const std::lock_guard<std::mutex> lock(shelf_->mutex);
  delivery->delivered = true;
  shelf_->delivered = true;
  shelf_->wake.notify_all();
}

void Deliveries::close() {
  shelf_->end();
  if (thread_.joinable()) {
    thread_.join();
  }
}

} // namespace torch_sm3::distributed
