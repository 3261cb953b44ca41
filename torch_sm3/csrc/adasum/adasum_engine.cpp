// SPDX-License-Identifier: Apache-2.0
#include "adasum_engine.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <utility>

namespace torch_sm3::distributed {

Engine::Engine(
    const GroupPtr& group,
    const GroupPtr& shards,
    std::chrono::milliseconds timeout,
    int local_world_size,
    const char* op) {
  const auto make = [&](c10::Device device, bool threaded) {
    auto exchange = std::make_unique<Exchange>(
        make_transport(group, device, timeout),
        shards ? make_transport(shards, device, timeout) : nullptr);
    exchange->introduce(
        local_world_size,
        c10::str(op, ": comparing the libraries of all ranks"));
    return std::make_unique<Worker>(std::move(exchange), threaded);
  };
  if (has_host(group)) {
    host_ = make(c10::kCPU, true);
  }
  if (is_enqueued(group, c10::kCUDA)) {
    const c10::impl::VirtualGuardImpl impl(c10::kCUDA);
    enqueued_ = make(impl.getDevice(), false);
  }
  TORCH_CHECK_VALUE(
      host_ != nullptr || enqueued_ != nullptr,
      op,
      ": expected a process group for CPU or CUDA tensors, but got backend '",
      group->getBackendName(),
      "' (argument 'process_group')");
}

void Engine::check(const Request& request, const char* op) {
  check_request(request, size(), op);
  worker_for(request.tensors[0], op);
}

Algorithm Engine::algorithm(const Plan& plan, int64_t bytes, const char* op) {
  return any().exchange().algorithm(
      plan, host_ ? c10::kCPU : c10::kCUDA, bytes, op);
}

int64_t Engine::submit(Request request, Worker::Done done) {
  Worker& worker = worker_for(request.tensors[0], request.what.c_str());
  const int64_t ticket = tickets_++;
  worker.submit(ticket, std::move(request), std::move(done));
  return ticket;
}

at::Tensor Engine::swap(const at::Tensor& tensor, const std::string& what) {
  return any().swap(tensor, what);
}

Outcome Engine::outcome(int64_t ticket, const char* op) {
  for (Worker* worker : {host_.get(), enqueued_.get()}) {
    if (worker != nullptr) {
      if (std::optional<Outcome> outcome = worker->outcome(ticket)) {
        return *std::move(outcome);
      }
    }
  }
  TORCH_CHECK(
      false,
      op,
      ": expected the ticket of a request with metrics that has ended and was "
      "not asked for before, but got ",
      ticket,
      " (argument 'ticket')");
}

void Engine::forget(int64_t ticket) {
  for (Worker* worker : {host_.get(), enqueued_.get()}) {
    if (worker != nullptr) {
      worker->forget(ticket);
    }
  }
}

void Engine::drain() {
  for (Worker* worker : {host_.get(), enqueued_.get()}) {
    if (worker != nullptr) {
      worker->drain();
    }
  }
}

void Engine::close() {
  for (Worker* worker : {host_.get(), enqueued_.get()}) {
    if (worker != nullptr) {
      worker->close();
    }
  }
}

void Engine::damage(int64_t byte) {
  any().exchange().damage(byte);
}

Worker& Engine::worker_for(const at::Tensor& tensor, const char* op) {
  const bool enqueue = enqueued_ != nullptr && !tensor.device().is_cpu();
  TORCH_CHECK_VALUE(
      enqueue || host_ != nullptr,
      op,
      ": expected CUDA tensors for a group without a backend for the CPU, but "
      "got one on ",
      tensor.device(),
      " (argument 'tensors')");
  return enqueue ? *enqueued_ : *host_;
}

} // namespace torch_sm3::distributed
