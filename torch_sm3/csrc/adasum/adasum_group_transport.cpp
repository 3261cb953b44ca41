// SPDX-License-Identifier: Apache-2.0
#include "adasum_group_transport.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace torch_sm3::distributed {

class GroupTransport::Works : public Transport::Posted {
 public:
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<int> peers; // of the works, receives first
  size_t receives = 0;
  std::chrono::steady_clock::time_point deadline;
  std::string what;
};

GroupTransport::GroupTransport(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    std::chrono::milliseconds timeout)
    : group_(std::move(group)),
      timeout_(timeout),
      rank_(group_->getRank()),
      size_(group_->getSize()),
      place_(place_of(rank_, size_, group_->getGroupName())) {}

GroupTransport::Works GroupTransport::start(std::string what) const {
  Works works;
  works.deadline = std::chrono::steady_clock::now() + timeout_;
  works.what = std::move(what);
  return works;
}

std::unique_ptr<Transport::Posted> GroupTransport::post(
    std::vector<Message> receives,
    std::vector<Message> sends,
    int tag,
    std::string what) {
  auto works = std::make_unique<Works>(start(std::move(what)));
  const auto start_all = [&](std::vector<Message>& messages, bool receive) {
    // Every rank starts with its right neighbour, so no rank is asked by all
    // others at once.
    std::sort(
        messages.begin(),
        messages.end(),
        [this](const Message& a, const Message& b) {
          return (a.peer - rank_ + size_) % size_ <
                 (b.peer - rank_ + size_) % size_;
        });
    for (const Message& message : messages) {
      if (message.data.numel() == 0) {
        continue;
      }
      std::vector<at::Tensor> tensors = {message.data};
      try {
        works->works.push_back(
            receive ? group_->recv(tensors, message.peer, tag)
                    : group_->send(tensors, message.peer, tag));
      } catch (const std::exception& error) {
        fail(
            *works,
            c10::str("rank ", message.peer, " to be there"),
            error.what());
      }
      works->peers.push_back(message.peer);
    }
  };
  start_all(receives, true);
  works->receives = works->works.size();
  start_all(sends, false);
  count(sends);
  return works;
}

void GroupTransport::wait(Posted& posted) {
  const auto& works = static_cast<const Works&>(posted);
  enter(works);
  for (size_t k = 0; k < works.works.size(); ++k) {
    const char* action = k < works.receives ? " to send" : " to receive";
    wait_one(works, k, c10::str("rank ", works.peers[k], action));
  }
  leave();
}

void GroupTransport::sum(at::Tensor& tensor, std::string what) {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.timeout = timeout_;
  Works works = start(std::move(what));
  constexpr const char* expected = "all ranks to take part";
  try {
    works.works.push_back(group_->allreduce(tensors, options));
  } catch (const std::exception& error) {
    fail(works, expected, error.what());
  }
  enter(works);
  wait_one(works, 0, expected);
  leave();
}

void GroupTransport::interrupt() {
  const std::lock_guard<std::mutex> lock(mutex_);
  interrupted_ = true;
  for (const auto& work : waiting_) {
    try {
      work->abort();
    } catch (const c10::Error&) {
      // The backend cannot abort this kind of work; its wait ends by itself.
    }
  }
}

void GroupTransport::enter(const Works& works) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!interrupted_, works.what, ": the exchange was closed", place_);
  waiting_ = works.works;
}

void GroupTransport::leave() {
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.clear();
}

void GroupTransport::fail(
    const Works& works,
    const std::string& expected,
    const std::string& got) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.clear();
    TORCH_CHECK(!interrupted_, works.what, ": the exchange was closed", place_);
  }
  throw_backend_error(works.what, expected, timeout_, got, place_);
}

void GroupTransport::wait_one(
    const Works& works,
    size_t index,
    const std::string& expected) {
  // Zero would mean the backend's own timeout.
  const auto left = std::max(
      std::chrono::milliseconds(1),
      std::chrono::duration_cast<std::chrono::milliseconds>(
          works.deadline - std::chrono::steady_clock::now()));
  std::string reason = "an aborted wait";
  try {
    if (works.works[index]->wait(left)) {
      return;
    }
  } catch (const std::exception& error) {
    reason = error.what();
  }
  fail(works, expected, reason);
}

} // namespace torch_sm3::distributed
