// SPDX-License-Identifier: Apache-2.0
#include "adasum_worker.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <future>
#include <utility>

namespace torch_sm3::distributed {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
}

} // namespace

Worker::Worker(std::unique_ptr<Exchange> exchange)
    : exchange_(std::move(exchange)) {
  thread_ = std::thread([this] { work(); });
}

Worker::~Worker() {
  close();
}

int64_t Worker::submit(Request request, Done done) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t ticket = tickets_++;
  const auto queued = std::chrono::steady_clock::now();
  std::string what = request.what;
  auto run = [this, ticket, queued, request = std::move(request)]() mutable {
    const double waited = seconds_since(queued);
    Outcome outcome = exchange_->run(request);
    // What the caller gets back must have no other owner.
    request.tensors.clear();
    request.outputs.clear();
    if (request.metrics) {
      outcome.seconds[static_cast<size_t>(Phase::wait)] = waited;
      const std::lock_guard<std::mutex> lock(mutex_);
      outcomes_.emplace(ticket, std::move(outcome));
    }
  };
  push({std::move(what), std::move(run), std::move(done)});
  return ticket;
}

at::Tensor Worker::swap(const at::Tensor& tensor, const std::string& what) {
  std::promise<at::Tensor> promise;
  std::future<at::Tensor> future = promise.get_future();
  at::Tensor all;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    push(
        {what,
         [&] { all = exchange_->swap(tensor, what); },
         [&](const std::exception_ptr& error) {
           if (error != nullptr) {
             promise.set_exception(error);
           } else {
             promise.set_value(all);
           }
         }});
  }
  return future.get();
}

Outcome Worker::outcome(int64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto node = outcomes_.extract(ticket);
  TORCH_CHECK(
      !node.empty(),
      "AdasumExchange.outcome: expected the ticket of a request with metrics "
      "that has ended and was not asked for before, but got ",
      ticket,
      " (argument 'ticket')");
  return std::move(node.mapped());
}

void Worker::forget(int64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  outcomes_.erase(outcomes_.begin(), outcomes_.lower_bound(ticket));
}

void Worker::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

void Worker::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    wake_.notify_all();
  }
  exchange_->interrupt();
  const std::lock_guard<std::mutex> joining(joining_);
  if (thread_.joinable()) {
    thread_.join();
  }
}

// Under the lock.
void Worker::push(Job job) {
  TORCH_CHECK(
      !closing_,
      job.what,
      ": expected an open state, but got one after close()");
  queue_.push_back(std::move(job));
  wake_.notify_all();
}

void Worker::work() {
  for (;;) {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) {
      return;
    }
    Job job = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    finish(std::move(job));
    lock.lock();
    busy_ = false;
    wake_.notify_all();
  }
}

void Worker::finish(Job job) {
  if (failure_ == nullptr) {
    try {
      job.run();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }
  job.run = nullptr; // lets go of the tensors before anyone is told
  job.done(failure_);
}

} // namespace torch_sm3::distributed
