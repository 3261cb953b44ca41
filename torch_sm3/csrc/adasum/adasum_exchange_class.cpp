// SPDX-License-Identifier: Apache-2.0

/// \file
/// torch.classes.torch_sm3.AdasumExchange: the thread behind a Python state.
///
/// The thread never needs Python's lock: the value of a future, a Python
/// object, is handed over ready-made and only passed on.

#include "adasum_future_type.h"
#include "adasum_group_transport.h"
#include "adasum_names.h"
#include "adasum_plan_class.h"
#include "adasum_worker.h"

#include <torch/custom_class.h>

#include <chrono>
#include <optional>
#include <tuple>
#include <utility>

namespace torch_sm3::distributed {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using PlanPtr = c10::intrusive_ptr<PlanHolder>;
using Tensors = std::vector<at::Tensor>;

std::unique_ptr<Transport> transport_of(const GroupPtr& group, double seconds) {
  return std::make_unique<GroupTransport>(
      group, std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000.0)));
}

class ExchangeHolder : public torch::CustomClassHolder {
 public:
  ExchangeHolder(
      const GroupPtr& group,
      double timeout_seconds,
      const std::optional<GroupPtr>& shard_group,
      int64_t local_world_size)
      : worker_(introduced(
            transport_of(group, timeout_seconds),
            shard_group ? transport_of(*shard_group, timeout_seconds) : nullptr,
            static_cast<int>(local_world_size))) {}

  /// Refuses what `submit` would refuse.
  void check(
      const PlanPtr& plan,
      Tensors tensors,
      Tensors outputs,
      const std::string& what) {
    check_request(
        request_of(plan, std::move(tensors), std::move(outputs)),
        worker_.exchange().size(),
        what.c_str());
  }

  /// What a bucket of CPU tensors will be combined by.
  std::string algorithm(const PlanPtr& plan, int64_t bytes) {
    return name_of(worker_.exchange().algorithm(
        *plan->plan, c10::kCPU, bytes, "AdasumState"));
  }

  /// Queues a request. `value` is a finished future with the Python object that
  /// `result` will hold.
  int64_t submit(
      const PlanPtr& plan,
      Tensors tensors,
      Tensors outputs,
      bool mean,
      const std::string& check,
      bool metrics,
      bool release,
      const std::string& what,
      FuturePtr value,
      FuturePtr result) {
    Request request = request_of(plan, std::move(tensors), std::move(outputs));
    check_request(request, worker_.exchange().size(), what.c_str());
    for (Tensors* list : {&request.tensors, &request.outputs}) {
      for (at::Tensor& tensor : *list) {
        // An alias without a Python object: to let go of one takes Python's
        // lock.
        tensor = tensor.detach();
      }
    }
    request.mean = mean;
    request.check = parse_check(check, what.c_str());
    request.metrics = metrics;
    request.release = release;
    request.what = what + plan->layers;
    return worker_.submit(
        std::move(request),
        [value = std::move(value),
         result = std::move(result)](const std::exception_ptr& error) mutable {
          if (error != nullptr) {
            result->setError(error);
            return;
          }
          c10::IValue object = value->value();
          value.reset();
          result->markCompleted(std::move(object));
        });
  }

  using OutcomeTuple = std::tuple<
      std::optional<at::Tensor>,
      std::optional<at::Tensor>,
      std::optional<at::Tensor>,
      std::optional<at::Tensor>,
      std::vector<double>,
      int64_t,
      int64_t>;

  /// What metrics are made from; once, after the future has completed.
  OutcomeTuple outcome(int64_t ticket) {
    const Outcome outcome = worker_.outcome(ticket);
    const auto optional = [](const at::Tensor& tensor) {
      return tensor.defined() ? std::optional(tensor) : std::nullopt;
    };
    return {
        optional(outcome.gram),
        optional(outcome.coefficients),
        optional(outcome.report),
        optional(outcome.cosines),
        {outcome.seconds.begin(), outcome.seconds.end()},
        outcome.bytes_sent,
        outcome.messages_sent};
  }

  void forget(int64_t ticket) {
    worker_.forget(ticket);
  }

  at::Tensor swap(const at::Tensor& tensor, const std::string& what) {
    return worker_.swap(tensor, what);
  }

  void damage(int64_t byte) {
    worker_.exchange().damage(byte);
  }

  void drain() {
    worker_.drain();
  }

  void close() {
    worker_.close();
  }

  int64_t rank() {
    return worker_.exchange().rank();
  }

  int64_t size() {
    return worker_.exchange().size();
  }

 private:
  static std::unique_ptr<Exchange> introduced(
      std::unique_ptr<Transport> ranks,
      std::unique_ptr<Transport> shards,
      int local_world_size) {
    auto exchange =
        std::make_unique<Exchange>(std::move(ranks), std::move(shards));
    exchange->introduce(
        local_world_size, "AdasumState: comparing the libraries of all ranks");
    return exchange;
  }

  static Request
  request_of(const PlanPtr& plan, Tensors tensors, Tensors outputs) {
    Request request;
    request.plan = plan->plan;
    request.tensors = std::move(tensors);
    request.outputs = std::move(outputs);
    return request;
  }

  Worker worker_;
};

} // namespace

TORCH_LIBRARY_FRAGMENT(torch_sm3, m) {
  register_plan(m);
  m.class_<ExchangeHolder>("AdasumExchange")
      .def(
          torch::init<
              const GroupPtr&,
              double,
              const std::optional<GroupPtr>&,
              int64_t>())
      .def("check", &ExchangeHolder::check)
      .def("algorithm", &ExchangeHolder::algorithm)
      .def("submit", &ExchangeHolder::submit)
      .def("outcome", &ExchangeHolder::outcome)
      .def("forget", &ExchangeHolder::forget)
      .def("swap", &ExchangeHolder::swap)
      .def("damage", &ExchangeHolder::damage)
      .def("drain", &ExchangeHolder::drain)
      .def("close", &ExchangeHolder::close)
      .def("rank", &ExchangeHolder::rank)
      .def("size", &ExchangeHolder::size);
}

} // namespace torch_sm3::distributed
