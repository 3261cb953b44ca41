// SPDX-License-Identifier: Apache-2.0
#include "adasum_transport.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace torch_sm3::distributed {

Transport::Transport(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    std::chrono::milliseconds timeout)
    : group_(std::move(group)),
      timeout_(timeout),
      rank_(group_->getRank()),
      size_(group_->getSize()),
      place_(
          c10::str(
              " [rank ",
              rank_,
              " of ",
              size_,
              ", group ",
              group_->getGroupName(),
              "]")) {}

Transport::Posted
Transport::post(const std::vector<at::Tensor>& rows, int tag) {
  Posted posted;
  posted.deadline = std::chrono::steady_clock::now() + timeout_;
  for (const bool receive : {true, false}) {
    // Every rank starts with its right neighbour, so no rank is asked by all
    // others at once.
    for (int step = 1; step < size_; ++step) {
      const int peer = (rank_ + step) % size_;
      std::vector<at::Tensor> message = {rows[receive ? peer : rank_]};
      posted.works.push_back(
          receive ? group_->recv(message, peer, tag)
                  : group_->send(message, peer, tag));
      posted.peers.push_back(peer);
    }
  }
  return posted;
}

void Transport::wait(const Posted& posted, const std::string& what) {
  enter(posted);
  try {
    for (size_t k = 0; k < posted.works.size(); ++k) {
      const bool receive = k < posted.works.size() / 2;
      wait_one(
          posted.works[k],
          posted.deadline,
          c10::str(
              what,
              ": expected rank ",
              posted.peers[k],
              receive ? " to send" : " to receive"));
    }
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

void Transport::sum(at::Tensor& tensor, const std::string& what) {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.timeout = timeout_;
  Posted posted;
  posted.deadline = std::chrono::steady_clock::now() + timeout_;
  posted.works.push_back(group_->allreduce(tensors, options));
  enter(posted);
  try {
    wait_one(
        posted.works[0],
        posted.deadline,
        c10::str(what, ": expected all ranks to take part"));
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

void Transport::interrupt() {
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

void Transport::enter(const Posted& posted) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(!interrupted_, "adasum: the exchange was closed", place_);
  waiting_ = posted.works;
}

void Transport::leave() {
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.clear();
}

bool Transport::interrupted() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return interrupted_;
}

void Transport::wait_one(
    const c10::intrusive_ptr<c10d::Work>& work,
    std::chrono::steady_clock::time_point deadline,
    const std::string& waiting_for) {
  // Zero would mean the backend's own timeout.
  const auto left = std::max(
      std::chrono::milliseconds(1),
      std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now()));
  std::string reason;
  try {
    if (work->wait(left)) {
      return;
    }
    reason = "an aborted wait";
  } catch (const std::exception& error) {
    reason = error.what();
  }
  TORCH_CHECK(
      !interrupted(), "adasum: the exchange was closed while waiting", place_);
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(
          waiting_for,
          " within ",
          std::chrono::duration<double>(timeout_).count(),
          " s, but got: ",
          reason,
          place_));
}

} // namespace torch_sm3::distributed
