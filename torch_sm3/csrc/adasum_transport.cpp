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

Transport::Posted Transport::start(std::string what) const {
  return {{}, {}, std::chrono::steady_clock::now() + timeout_, std::move(what)};
}

Transport::Posted Transport::post(
    const std::vector<at::Tensor>& rows,
    int tag,
    std::string what) {
  Posted posted = start(std::move(what));
  for (const bool receive : {true, false}) {
    // Every rank starts with its right neighbour, so no rank is asked by all
    // others at once.
    for (int step = 1; step < size_; ++step) {
      const int peer = (rank_ + step) % size_;
      std::vector<at::Tensor> message = {rows[receive ? peer : rank_]};
      try {
        posted.works.push_back(
            receive ? group_->recv(message, peer, tag)
                    : group_->send(message, peer, tag));
      } catch (const std::exception& error) {
        fail(posted, c10::str("rank ", peer, " to be there"), error.what());
      }
      posted.peers.push_back(peer);
    }
  }
  return posted;
}

void Transport::wait(const Posted& posted) {
  enter(posted);
  const size_t receives = posted.works.size() / 2;
  for (size_t k = 0; k < posted.works.size(); ++k) {
    const char* action = k < receives ? " to send" : " to receive";
    wait_one(posted, k, c10::str("rank ", posted.peers[k], action));
  }
  leave();
}

void Transport::sum(at::Tensor& tensor, std::string what) {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.timeout = timeout_;
  Posted posted = start(std::move(what));
  constexpr const char* expected = "all ranks to take part";
  try {
    posted.works.push_back(group_->allreduce(tensors, options));
  } catch (const std::exception& error) {
    fail(posted, expected, error.what());
  }
  enter(posted);
  wait_one(posted, 0, expected);
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
  TORCH_CHECK(!interrupted_, posted.what, ": the exchange was closed", place_);
  waiting_ = posted.works;
}

void Transport::leave() {
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.clear();
}

void Transport::fail(
    const Posted& posted,
    const std::string& expected,
    const std::string& got) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.clear();
    TORCH_CHECK(
        !interrupted_, posted.what, ": the exchange was closed", place_);
  }
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(
          posted.what,
          ": expected ",
          expected,
          " within ",
          std::chrono::duration<double>(timeout_).count(),
          " s, but got: ",
          got,
          place_));
}

void Transport::wait_one(
    const Posted& posted,
    size_t index,
    const std::string& expected) {
  // Zero would mean the backend's own timeout.
  const auto left = std::max(
      std::chrono::milliseconds(1),
      std::chrono::duration_cast<std::chrono::milliseconds>(
          posted.deadline - std::chrono::steady_clock::now()));
  std::string reason = "an aborted wait";
  try {
    if (posted.works[index]->wait(left)) {
      return;
    }
  } catch (const std::exception& error) {
    reason = error.what();
  }
  fail(posted, expected, reason);
}

} // namespace torch_sm3::distributed
