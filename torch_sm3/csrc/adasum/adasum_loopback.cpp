// SPDX-License-Identifier: Apache-2.0
#include "adasum_loopback.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace torch_sm3::distributed {
namespace {

// Half of a message: what one rank sends, or where another one receives.
struct Half {
  explicit Half(at::Tensor tensor) : data(std::move(tensor)) {}

  at::Tensor data;
  bool taken = false; // by whoever copies it
  bool done = false;
  std::string failure;
};
using HalfPtr = std::shared_ptr<Half>;

// One all-reduce; computed by the last rank that comes.
struct Sum {
  std::vector<at::Tensor> tensors;
  int missing = 0;
  bool done = false;
  bool abandoned = false;
};

// Where the threads meet. All members are guarded by `mutex`, but for the data
// of halves that are taken.
struct Hub {
  explicit Hub(int ranks) : dead(ranks, false) {}

  std::mutex mutex;
  std::condition_variable changed;
  std::vector<bool> dead;
  // By sender, receiver and tag, in the order of posting.
  std::map<std::tuple<int, int, int>, std::deque<HalfPtr>> sends, receives;
  std::map<int64_t, std::shared_ptr<Sum>> sums;
};

class LoopbackPosted : public Transport::Posted {
 public:
  struct Part {
    HalfPtr half;
    int peer;
    bool receive;
  };

  explicit LoopbackPosted(std::shared_ptr<Hub> meeting)
      : hub(std::move(meeting)) {}

  // Takes back what nobody met, and waits for whoever uses the tensors.
  ~LoopbackPosted() override {
    std::unique_lock<std::mutex> lock(hub->mutex);
    for (const Part& part : parts) {
      hub->changed.wait(
          lock, [&] { return part.half->done || !part.half->taken; });
      part.half->done = true;
    }
  }

  const std::shared_ptr<Hub> hub;
  std::vector<Part> parts;
  std::chrono::steady_clock::time_point deadline;
  std::string what;
};

class LoopbackTransport : public Transport {
 public:
  LoopbackTransport(
      std::shared_ptr<Hub> hub,
      int rank,
      std::chrono::milliseconds timeout,
      bool host_waits)
      : hub_(std::move(hub)),
        rank_(rank),
        size_(static_cast<int>(hub_->dead.size())),
        timeout_(timeout),
        host_waits_(host_waits),
        place_(place_of(rank, size_, "loopback")) {}

  ~LoopbackTransport() override {
    const std::lock_guard<std::mutex> lock(hub_->mutex);
    hub_->dead[rank_] = true;
    hub_->changed.notify_all();
  }

  int rank() const override {
    return rank_;
  }
  int size() const override {
    return size_;
  }
  const std::string& place() const override {
    return place_;
  }
  bool host_waits() const override {
    return host_waits_;
  }

  std::unique_ptr<Posted> post(
      std::vector<Message> receives,
      std::vector<Message> sends,
      int tag,
      std::string what) override {
    auto posted = std::make_unique<LoopbackPosted>(hub_);
    posted->deadline = std::chrono::steady_clock::now() + timeout_;
    posted->what = std::move(what);
    std::vector<std::pair<HalfPtr, HalfPtr>> complete;
    {
      const std::lock_guard<std::mutex> lock(hub_->mutex);
      check_open(posted->what);
      for (const Message& message : receives) {
        if (message.data.numel() > 0) {
          const std::tuple key{message.peer, rank_, tag};
          auto half = std::make_shared<Half>(message.data);
          posted->parts.push_back({half, message.peer, true});
          if (HalfPtr other = meet(hub_->sends, hub_->receives, key, half)) {
            complete.emplace_back(std::move(other), std::move(half));
          }
        }
      }
      for (const Message& message : sends) {
        if (message.data.numel() > 0) {
          const std::tuple key{rank_, message.peer, tag};
          auto half = std::make_shared<Half>(message.data);
          posted->parts.push_back({half, message.peer, false});
          if (HalfPtr other = meet(hub_->receives, hub_->sends, key, half)) {
            complete.emplace_back(std::move(half), std::move(other));
          }
        }
      }
    }
    for (const auto& [from, to] : complete) {
      copy(*from, *to);
    }
    count(sends);
    return posted;
  }

  void wait(Posted& posted) override {
    auto& mine = static_cast<LoopbackPosted&>(posted);
    std::unique_lock<std::mutex> lock(hub_->mutex);
    for (const LoopbackPosted::Part& part : mine.parts) {
      Half& half = *part.half;
      hub_->changed.wait_until(lock, mine.deadline, [&] {
        return half.done || interrupted_ ||
               (hub_->dead[part.peer] && !half.taken);
      });
      // Until it ends, the other thread reads or writes this tensor.
      hub_->changed.wait(lock, [&] { return half.done || !half.taken; });
      check_open(mine.what);
      if (!half.done || !half.failure.empty()) {
        std::string got = half.failure;
        if (got.empty()) {
          got = hub_->dead[part.peer] ? "a rank that is gone" : "no message";
        }
        lock.unlock();
        throw_backend_error(
            mine.what,
            c10::str(
                "rank ", part.peer, part.receive ? " to send" : " to receive"),
            timeout_,
            got,
            place_);
      }
    }
  }

  void sum(at::Tensor& tensor, std::string what) override {
    std::unique_lock<std::mutex> lock(hub_->mutex);
    check_open(what);
    const int64_t index = sums_++;
    std::shared_ptr<Sum>& slot = hub_->sums[index];
    if (slot == nullptr) {
      slot = std::make_shared<Sum>();
      slot->tensors.resize(size_);
      slot->missing = size_;
    }
    const std::shared_ptr<Sum> sum = slot;
    sum->tensors[rank_] = tensor;
    if (--sum->missing == 0) {
      hub_->sums.erase(index);
      if (!sum->abandoned) {
        add(*sum);
        sum->done = true;
      }
      hub_->changed.notify_all();
    }
    const auto hopeless = [&] {
      for (int peer = 0; peer < size_; ++peer) {
        if (hub_->dead[peer] && !sum->tensors[peer].defined()) {
          return true;
        }
      }
      return sum->abandoned || interrupted_;
    };
    hub_->changed.wait_for(
        lock, timeout_, [&] { return sum->done || hopeless(); });
    if (!sum->done) {
      sum->abandoned = true;
      hub_->changed.notify_all();
      check_open(what);
      lock.unlock();
      throw_backend_error(
          what, "all ranks to take part", timeout_, "too few ranks", place_);
    }
  }

  void interrupt() override {
    const std::lock_guard<std::mutex> lock(hub_->mutex);
    interrupted_ = true;
    hub_->changed.notify_all();
  }

 private:
  using Queues = std::map<std::tuple<int, int, int>, std::deque<HalfPtr>>;

  // The other half of a message if it is there; else `half` waits for it.
  static HalfPtr meet(
      Queues& others,
      Queues& own,
      const std::tuple<int, int, int>& key,
      const HalfPtr& half) {
    const auto found = others.find(key);
    while (found != others.end() && !found->second.empty()) {
      HalfPtr other = std::move(found->second.front());
      found->second.pop_front();
      if (!other->done) { // not taken back
        half->taken = other->taken = true;
        return other;
      }
    }
    own[key].push_back(half);
    return nullptr;
  }

  // Without the lock: nobody else touches halves that are taken.
  void copy(Half& from, Half& to) {
    std::string failure;
    if (from.data.nbytes() == to.data.nbytes()) {
      const at::NoGradGuard no_grad;
      to.data.view(at::kByte).copy_(from.data.view(at::kByte));
    } else {
      failure = c10::str(
          "a message of ",
          from.data.nbytes(),
          " bytes where ",
          to.data.nbytes(),
          " were expected");
    }
    const std::lock_guard<std::mutex> lock(hub_->mutex);
    for (Half* half : {&from, &to}) {
      half->done = true;
      half->failure = failure;
    }
    hub_->changed.notify_all();
  }

  // In rank order; under the lock.
  static void add(Sum& sum) {
    const at::NoGradGuard no_grad;
    at::Tensor total = at::zeros_like(sum.tensors[0]);
    for (const at::Tensor& tensor : sum.tensors) {
      total.add_(tensor);
    }
    for (at::Tensor& tensor : sum.tensors) {
      tensor.copy_(total);
    }
  }

  // Under the lock.
  void check_open(const std::string& what) const {
    TORCH_CHECK(!interrupted_, what, ": the exchange was closed", place_);
  }

  const std::shared_ptr<Hub> hub_;
  const int rank_;
  const int size_;
  const std::chrono::milliseconds timeout_;
  const bool host_waits_;
  const std::string place_;
  bool interrupted_ = false; // guarded by the hub's mutex
  int64_t sums_ = 0;
};

} // namespace

std::vector<std::unique_ptr<Transport>> loopback_transports(
    int ranks,
    std::chrono::milliseconds timeout,
    bool host_waits) {
  const auto hub = std::make_shared<Hub>(ranks);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < ranks; ++rank) {
    transports.push_back(
        std::make_unique<LoopbackTransport>(hub, rank, timeout, host_waits));
  }
  return transports;
}

} // namespace torch_sm3::distributed
