// SPDX-License-Identifier: Apache-2.0
#include "adasum_collective_transport.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <utility>

namespace torch_sm3::distributed {

class CollectiveTransport::Enqueued : public Transport::Posted {
 public:
  c10::intrusive_ptr<c10d::Work> work;
  std::string what;
};

CollectiveTransport::CollectiveTransport(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    c10::Device device,
    std::chrono::milliseconds timeout)
    : group_(std::move(group)),
      device_(device),
      timeout_(timeout),
      rank_(group_->getRank()),
      size_(group_->getSize()),
      place_(place_of(rank_, size_, group_->getGroupName())) {}

// Calls the backend; its errors get the words of this library.
template <class Call>
auto CollectiveTransport::guarded(const std::string& what, const Call& call)
    const {
  TORCH_CHECK(!interrupted_, what, ": the exchange was closed", place_);
  try {
    return call();
  } catch (const std::exception& error) {
    throw_backend_error(
        what, "all ranks to take part", timeout_, error.what(), place_);
  }
}

std::unique_ptr<Transport::Posted> CollectiveTransport::post(
    std::vector<Message> receives,
    std::vector<Message> sends,
    int /*tag*/,
    std::string what) {
  // Bytes, because one step may carry several dtypes.
  const at::Tensor nothing =
      at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device_));
  std::vector<at::Tensor> outputs(size_, nothing), inputs(size_, nothing);
  for (const Message& message : receives) {
    outputs[message.peer] = message.data.view(at::kByte);
  }
  for (const Message& message : sends) {
    inputs[message.peer] = message.data.view(at::kByte);
  }
  count(sends);
  auto enqueued = std::make_unique<Enqueued>();
  enqueued->work = guarded(what, [&] {
    c10d::AllToAllOptions options;
    options.timeout = timeout_;
    return group_->alltoall(outputs, inputs, options);
  });
  enqueued->what = std::move(what);
  return enqueued;
}

void CollectiveTransport::wait(Posted& posted) {
  const auto& enqueued = static_cast<const Enqueued&>(posted);
  // Without a timeout: with one, the host would wait.
  guarded(enqueued.what, [&] { return enqueued.work->wait(); });
}

void CollectiveTransport::sum(at::Tensor& tensor, std::string what) {
  std::vector<at::Tensor> tensors = {tensor};
  guarded(what, [&] {
    c10d::AllreduceOptions options;
    options.timeout = timeout_;
    return group_->allreduce(tensors, options)->wait();
  });
}

} // namespace torch_sm3::distributed
