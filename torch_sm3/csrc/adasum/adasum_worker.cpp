// SPDX-License-Identifier: Apache-2.0
#include "adasum_worker.h"

#include "adasum_surroundings.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <future>
#include <optional>
#include <utility>

namespace torch_sm3::distributed {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
}

} // namespace

Worker::Worker(std::unique_ptr<Exchange> exchange, bool threaded)
    : exchange_(std::move(exchange)), threaded_(threaded) {
  if (threaded) {
    thread_ = std::thread([this] { work(); });
  }
}

Worker::~Worker() {
  close();
}

void Worker::submit(int64_t ticket, Request request, Done done) {
  const auto queued = std::chrono::steady_clock::now();
  std::string what = request.what;
  const Lane::Mark mark = Lane::mark(request.tensors[0]);
  auto run = [this,
              ticket,
              queued,
              surroundings = Surroundings(),
              request = std::move(request)]() mutable {
    const Surroundings::Guard guard(surroundings);
    const double waited = seconds_since(queued);
    Outcome outcome = exchange_->run(request);
    Lane::keep(request.tensors);
    Lane::keep(request.outputs);
    if (request.metrics) {
      outcome.seconds[static_cast<size_t>(Phase::wait)] = waited;
      const std::lock_guard<std::mutex> lock(mutex_);
      outcomes_.emplace(ticket, std::move(outcome));
    }
  };
  push({std::move(what), std::move(run), std::move(done), mark});
}

at::Tensor Worker::swap(const at::Tensor& tensor, const std::string& what) {
  std::promise<at::Tensor> promise;
  at::Tensor all;
  push(
      {what,
       [&] { all = exchange_->swap(tensor, what); },
       [&](const std::exception_ptr& error) {
         if (error != nullptr) {
           promise.set_exception(error);
         } else {
           promise.set_value(all);
         }
       },
       {}});
  return promise.get_future().get();
}

std::optional<Outcome> Worker::outcome(int64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto node = outcomes_.extract(ticket);
  return node.empty() ? std::nullopt
                      : std::optional<Outcome>(std::move(node.mapped()));
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

void Worker::push(Job job) {
  std::unique_lock<std::mutex> lock(mutex_);
  TORCH_CHECK(
      !closing_,
      job.what,
      ": expected an open state, but got one after close()");
  if (threaded_) {
    queue_.push_back(std::move(job));
    wake_.notify_all();
    return;
  }
  lock.unlock();
  const std::lock_guard<std::mutex> in_order(order_);
  finish(std::move(job));
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
  std::optional<Lane::Scope> scope;
  if (failure_ == nullptr) {
    try {
      scope.emplace(lane_, job.mark);
      job.run();
    } catch (...) {
      failure_ = std::current_exception();
    }
  }
  job.run = nullptr; // lets go of the tensors before anyone is told
  job.done(failure_);
}

} // namespace torch_sm3::distributed
