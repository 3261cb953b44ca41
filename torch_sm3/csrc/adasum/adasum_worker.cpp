// SPDX-License-Identifier: Apache-2.0

/// \file
/// torch.classes.torch_sm3.AdasumExchange: the thread behind a Python state.
///
/// One thread per object is the only one that touches its process group, and it
/// works through the queue in order. It never needs Python's lock: the value of
/// a future, a Python object, is handed over ready-made and only passed on.

#include "adasum_exchange.h"
#include "adasum_group_transport.h"
#include "adasum_ops.h"

#include <ATen/core/ivalue.h>
#include <torch/custom_class.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <thread>
#include <utility>

namespace {
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
} // namespace

// torch can pass a Future to a method of a class but has no name for its type
// in the inference of signatures.
template <bool fake>
struct c10::detail::getMaybeFakeTypePtr_<FuturePtr, fake> final {
  static decltype(auto) call() {
    static const auto type = c10::FutureType::create(c10::AnyType::get());
    return type;
  }
};

namespace torch_sm3::distributed {
namespace {

class Worker : public torch::CustomClassHolder {
 public:
  Worker(
      const c10::intrusive_ptr<c10d::ProcessGroup>& group,
      double timeout_seconds)
      : exchange_(
            std::make_unique<GroupTransport>(
                group,
                std::chrono::milliseconds(
                    static_cast<int64_t>(timeout_seconds * 1000.0)))) {
    if (exchange_.transport().size() > 1) {
      exchange_.check_fingerprint("AdasumState");
    }
    thread_ = std::thread([this] { work(); });
  }

  ~Worker() override {
    close();
  }

  /// Refuses tensors that `submit` would refuse, each a layer of its own.
  void check(std::vector<at::Tensor> tensors, const std::string& what) {
    std::vector<int64_t> sizes;
    for (const at::Tensor& tensor : tensors) {
      sizes.push_back(tensor.numel());
    }
    Request request;
    request.plan = std::make_shared<const Plan>(Layout(std::move(sizes)));
    request.tensors = std::move(tensors);
    check_request(request, what.c_str());
  }

  /// Queues a request. `value` is a finished future with the Python object that
  /// `result` will hold.
  void submit(
      const std::vector<at::Tensor>& tensors,
      std::vector<int64_t> sizes,
      const std::string& mode,
      double scale,
      bool check,
      bool release,
      std::string what,
      FuturePtr value,
      FuturePtr result) {
    Job job;
    Plan plan(Layout(std::move(sizes)));
    plan.rule.mode = parse_mode(mode, "AdasumState");
    plan.rule.scale = scale;
    job.request.plan = std::make_shared<const Plan>(std::move(plan));
    for (const at::Tensor& tensor : tensors) {
      // An alias without a Python object: to let go of one takes Python's lock.
      job.request.tensors.push_back(tensor.detach());
    }
    job.request.check = check;
    job.request.release = release;
    check_request(job.request, what.c_str());
    job.request.what = std::move(what);
    job.value = std::move(value);
    job.result = std::move(result);
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(
        !closing_,
        job.request.what,
        ": expected an open state, but got one after close()");
    queue_.push_back(std::move(job));
    wake_.notify_all();
  }

  /// Waits until everything queued has ended, well or badly.
  void drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [this] { return queue_.empty() && !busy_; });
  }

  /// Stops the current wait, fails what is queued and ends the thread.
  void close() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
      wake_.notify_all();
    }
    exchange_.transport().interrupt();
    const std::lock_guard<std::mutex> joining(joining_);
    if (thread_.joinable()) {
      thread_.join();
    }
  }

 private:
  struct Job {
    Request request;
    FuturePtr value, result;
  };

  void work() {
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

  void finish(Job job) {
    // After one failure the ranks are out of step, so all later ones fail too.
    if (failure_ == nullptr) {
      try {
        exchange_.run(job.request);
      } catch (...) {
        failure_ = std::current_exception();
      }
    }
    job.request.tensors.clear();
    if (failure_ != nullptr) {
      job.result->setError(failure_);
      return;
    }
    c10::IValue value = job.value->value();
    job.value.reset();
    job.result->markCompleted(std::move(value));
  }

  Exchange exchange_;
  std::mutex mutex_, joining_;
  std::condition_variable wake_;
  std::deque<Job> queue_;
  bool closing_ = false;
  bool busy_ = false;
  std::exception_ptr failure_; // of the worker's thread only
  std::thread thread_;
};

} // namespace

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  m.class_<Worker>("AdasumExchange")
      .def(torch::init<const c10::intrusive_ptr<c10d::ProcessGroup>&, double>())
      .def("check", &Worker::check)
      .def("submit", &Worker::submit)
      .def("drain", &Worker::drain)
      .def("close", &Worker::close);
}

} // namespace torch_sm3::distributed
