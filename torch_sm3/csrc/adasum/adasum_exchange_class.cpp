// SPDX-License-Identifier: Apache-2.0

/// \file
/// torch.classes.torch_sm3.AdasumExchange: the thread behind a Python state.
///
/// The thread never needs Python's lock: the value of a future, a Python
/// object, is handed over ready-made and only passed on.

#include "adasum_deliveries.h"
#include "adasum_engine.h"
#include "adasum_names.h"
#include "adasum_plan_class.h"

#include <torch/custom_class.h>

#include <chrono>
#include <optional>
#include <tuple>
#include <utility>

namespace torch_sm3::distributed {
namespace {

constexpr const char* kOp = "AdasumState";

using PlanPtr = c10::intrusive_ptr<PlanHolder>;
using Tensors = std::vector<at::Tensor>;

// Memory that a future's value stands for, so that nobody has to look into the
// Python object.
std::vector<WeakStorage> storages_of(const Tensors& tensors) {
  std::vector<WeakStorage> storages;
  for (const at::Tensor& tensor : tensors) {
    storages.emplace_back(tensor.storage().getWeakStorageImpl());
  }
  return storages;
}

class ExchangeHolder : public torch::CustomClassHolder {
 public:
  ExchangeHolder(
      const GroupPtr& group,
      double timeout_seconds,
      const std::optional<GroupPtr>& shard_group,
      int64_t local_world_size)
      : engine_(
            group,
            shard_group.value_or(GroupPtr()),
            std::chrono::milliseconds(
                static_cast<int64_t>(timeout_seconds * 1000.0)),
            static_cast<int>(local_world_size),
            kOp) {}

  /// Refuses what `submit` would refuse.
  void check(
      const PlanPtr& plan,
      Tensors tensors,
      Tensors outputs,
      const std::string& what) {
    engine_.check(
        request_of(plan, std::move(tensors), std::move(outputs)), what.c_str());
  }

  /// What a bucket will be combined by.
  std::string algorithm(const PlanPtr& plan, int64_t bytes) {
    return name_of(engine_.algorithm(*plan->plan, bytes, kOp));
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
    engine_.check(request, what.c_str());
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
    const Tensors& results =
        request.outputs.empty() ? request.tensors : request.outputs;
    std::vector<WeakStorage> storages = storages_of(results);
    Deliveries::Delivery* delivery =
        deliveries_.add(std::move(value), std::move(result));
    try {
      return engine_.submit(
          std::move(request),
          [this, delivery, storages = std::move(storages)](
              const std::exception_ptr& error) {
            deliveries_.finish(delivery, error, storages);
          });
    } catch (...) {
      deliveries_.forget(delivery);
      throw;
    }
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
    const Outcome outcome = engine_.outcome(ticket, "AdasumExchange.outcome");
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
    engine_.forget(ticket);
  }

  at::Tensor swap(const at::Tensor& tensor, const std::string& what) {
    return engine_.swap(tensor, what);
  }

  void damage(int64_t byte) {
    engine_.damage(byte);
  }

  void drain() {
    engine_.drain();
  }

  void close() {
    engine_.close();
    deliveries_.close();
  }

  int64_t rank() {
    return engine_.rank();
  }

  int64_t size() {
    return engine_.size();
  }

 private:
  static Request
  request_of(const PlanPtr& plan, Tensors tensors, Tensors outputs) {
    Request request;
    request.plan = plan->plan;
    request.tensors = std::move(tensors);
    request.outputs = std::move(outputs);
    return request;
  }

  Deliveries deliveries_; // outlives the engine, whose thread uses it
  Engine engine_;
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
