// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The thread that works through requests while backward goes on.

#include "adasum_exchange.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace torch_sm3::distributed {

/// One thread, the only one that touches the exchange, and its queue.
class Worker {
 public:
  /// Called by the thread with the error of the request, or with null.
  using Done = std::function<void(const std::exception_ptr&)>;

  explicit Worker(std::unique_ptr<Exchange> exchange);
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  /// Closes.
  ~Worker();

  /// Queues a request that `check_request` has passed.
  ///
  /// After one failure the ranks are out of step, so all later requests fail
  /// with the same error, without a message.
  ///
  /// \return a ticket for `outcome`
  int64_t submit(Request request, Done done);

  /// Every rank's copy of a small CPU tensor, [p, ...]; in order with the
  /// queue, blocks.
  at::Tensor swap(const at::Tensor& tensor, const std::string& what);

  /// Hands over what metrics are made from, after the request has ended well.
  Outcome outcome(int64_t ticket);

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
  };

  void push(Job job);
  void work();
  void finish(Job job);

  const std::unique_ptr<Exchange> exchange_;
  std::mutex mutex_, joining_;
  std::condition_variable wake_;
  std::deque<Job> queue_;
  std::map<int64_t, Outcome> outcomes_;
  int64_t tickets_ = 0;
  bool closing_ = false;
  bool busy_ = false;
  std::exception_ptr failure_; // of the worker's thread only
  std::thread thread_;
};

} // namespace torch_sm3::distributed
