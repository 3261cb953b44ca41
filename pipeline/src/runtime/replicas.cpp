// SPDX-License-Identifier: Apache-2.0
#include <runtime/control.h>
#include <runtime/replicas.h>
#include <transport/values.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace torch_sm3::pipeline {
namespace {

// Set when a collective has ended, on whatever thread.
struct Done {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

} // namespace

Replicas::Replicas(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    double timeout,
    Transport* links)
    : group_(std::move(group)), timeout_(timeout), links_(links) {}

void Replicas::wait(const Work& work) const {
  const auto state = std::make_shared<Done>();
  work->getFuture()->addCallback([state](c10::ivalue::Future&) {
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->done = true;
    state->changed.notify_all();
  });
  using Clock = std::chrono::steady_clock;
  const auto slice = std::chrono::duration<double>(kSlice);
  const auto end = Clock::now() + std::chrono::duration<double>(timeout_);
  std::unique_lock<std::mutex> lock(state->mutex);
  while (!state->changed.wait_for(lock, slice, [&] { return state->done; })) {
    if (links_ != nullptr && !links_->failure().empty()) {
      throw LinksLost(); // the other ranks learn of it by their own links
    }
    if (Clock::now() > end) {
      throw ReplicaLost(
          c10::str(counterpart(), " was silent for ", timeout_, " s"),
          "TimeoutError");
    }
  }
  try {
    work->wait();
  } catch (const std::exception&) {
    throw ReplicaLost(
        counterpart() + " ended or left the pipeline", "PeerLost");
  }
}

// A collective tells that a rank is gone, not which. Of two, it is the other.
std::string Replicas::counterpart() const {
  if (size() == 2) {
    return c10::str(
        "the rank of replica ", 1 - rank(), " with the same stages");
  }
  std::string text = "one of the ranks with the same stages, of replicas";
  for (int64_t replica = 0; replica < size(); ++replica) {
    text += replica == rank() ? "" : c10::str(" ", replica);
  }
  text += ',';
  return text;
}

Replicas::Work Replicas::start_sum(at::Tensor tensor) const {
  std::vector<at::Tensor> one{std::move(tensor)};
  return group_->allreduce(one);
}

std::vector<double>
Replicas::reduce(const std::vector<double>& values, bool largest) const {
  at::Tensor tensor =
      at::empty({static_cast<int64_t>(values.size())}, at::kDouble);
  auto* data = tensor.mutable_data_ptr<double>();
  std::copy(values.begin(), values.end(), data);
  std::vector<at::Tensor> one{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp =
      largest ? c10d::ReduceOp::RedOpType::MAX : c10d::ReduceOp::RedOpType::SUM;
  wait(group_->allreduce(one, options));
  return {data, data + values.size()};
}

std::vector<double> Replicas::maximum(const std::vector<double>& values) const {
  return reduce(values, true);
}

std::vector<double> Replicas::total(const std::vector<double>& values) const {
  return reduce(values, false);
}

std::vector<c10::IValue> Replicas::gather(const c10::IValue& value) const {
  const std::string own = pack(value, "a report to hold").structure;
  std::vector<double> sizes(static_cast<size_t>(size()));
  sizes[static_cast<size_t>(rank())] = static_cast<double>(own.size());
  sizes = total(sizes);
  const auto most =
      static_cast<int64_t>(*std::max_element(sizes.begin(), sizes.end()));
  std::vector<at::Tensor> mine{at::zeros({most}, at::kByte)};
  std::copy(own.begin(), own.end(), mine[0].mutable_data_ptr<uint8_t>());
  std::vector<std::vector<at::Tensor>> parts(1);
  for (int64_t i = 0; i < size(); ++i) {
    parts[0].push_back(at::empty({most}, at::kByte));
  }
  wait(group_->allgather(parts, mine));
  std::vector<c10::IValue> values;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto* data = parts[0][i].const_data_ptr<uint8_t>();
    values.push_back(
        unpack({std::string(data, data + static_cast<size_t>(sizes[i])), {}}));
  }
  return values;
}

} // namespace torch_sm3::pipeline
