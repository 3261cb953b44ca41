// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The thread that works through requests while backward goes on.

#include "adasum_exchange.h"
#include "adasum_lane.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace torch_sm3::distributed {

/// One thread, the only one that touches the exchange, and its queue. Or no
/// thread, where requests are only enqueued on a device: then whoever submits
/// does that.
class Worker {
 public:
  /// Called with the error of the request, or with null; on the stream that
  /// the result will be on.
  using Done = std::function<void(const std::exception_ptr&)>;

  /// \param threaded whether it has a thread
  explicit Worker(std::unique_ptr<Exchange> exchange, bool threaded = true);
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  /// Closes.
  ~Worker();

  /// Queues a request that `check_request` has passed.
  ///
  /// After one failure the ranks are out of step, so all later requests fail
  /// with the same error, without a message.
  ///
  /// \param ticket names the request for `outcome`; ascending
  void submit(int64_t ticket, Request request, Done done);

  /// Every rank's copy of a small CPU tensor, [p, ...]; in order with the
  /// queue, blocks.
  at::Tensor swap(const at::Tensor& tensor, const std::string& what);

  /// Hands over what metrics are made from, once, after the request has ended
  /// well.
  std::optional<Outcome> outcome(int64_t ticket);

  /// Forgets the outcomes of all tickets below this one.
  void forget(int64_t ticket);

  /// Waits until everything queued has ended, well or badly.
  void drain();

  /// Stops the current wait, fails what is queued and ends the thread.
  void close();

  /// The exchange, for what needs no messages.
  Exchange& exchange() {
    return *exchange_;
  }

 private:
  struct Job {
    std::string what;
    std::function<void()> run;
    Done done;
    Lane::Mark mark;
  };

  void push(Job job);
  void work();
  void finish(Job job);

  const std::unique_ptr<Exchange> exchange_;
  std::mutex mutex_, joining_;
  std::condition_variable wake_;
  std::deque<Job> queue_;
  std::map<int64_t, Outcome> outcomes_;
  bool closing_ = false;
  bool busy_ = false;
  const bool threaded_;
  // Of the thread only; without one, of whoever holds the lock of `order_`.
  std::exception_ptr failure_;
  Lane lane_;
  std::mutex order_;
  std::thread thread_;
};

} // namespace torch_sm3::distributed
