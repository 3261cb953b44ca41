// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/transport.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace torch_sm3::pipeline {

// The threads and queues behind a Transport. Threads hold a shared pointer, so
// one that cannot be stopped never outlives what it uses.
class Transport::Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      TransportOptions options);

  void start();
  void begin(uint64_t step, bool evaluation);
  Outcome send(
      int64_t peer,
      MessageClass link_class,
      Header header,
      const std::vector<at::Tensor>& tensors,
      double seconds);
  int64_t receive(int64_t peer, MessageClass link_class, Header expected);
  Outcome wait(int64_t ticket, double seconds);
  Message take(int64_t ticket);
  bool flush(double seconds);
  void fail(const std::string& structure, int64_t except);
  std::string failure() const;
  void close();

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;
  using Work = c10::intrusive_ptr<c10d::Work>;

  // A message that was asked for.
  struct Receipt {
    int64_t peer = 0;
    MessageClass link_class = MessageClass::kControl;
    Header expected;
    std::optional<Message> message;
    std::optional<Clock::time_point> since; // start of the wait
  };
  // A message under way. The tensors alias what the caller may drop meanwhile.
  struct Parcel {
    std::vector<Work> works;
    std::vector<at::Tensor> tensors;
  };
  // One direction of one class between this rank and one peer.
  struct Link {
    int64_t peer = 0;
    MessageClass link_class = MessageClass::kControl;
    int tag = 0;
    std::deque<Parcel> parcels; // sent and not yet left
    std::deque<std::shared_ptr<Receipt>> asked;
    std::deque<Message> unasked; // control messages that came first
    std::optional<Clock::time_point> full_since;
    std::condition_variable wake;
    Work current; // what the thread waits for
    bool finished = false;
    std::thread thread;
  };
  using Key = std::pair<int64_t, MessageClass>;

  Link& outgoing(int64_t peer, MessageClass link_class);
  Link& incoming(int64_t peer, MessageClass link_class);
  void launch(Link& link, void (Engine::*run)(Link&));
  void run_outgoing(Link& link);
  void run_incoming(Link& link);
  void run_control(Link& link);
  bool await(Link& link, const Work& work);
  bool pull_bytes(Link& link, size_t size, std::vector<uint8_t>* bytes);
  std::optional<Message> pull(Link& link, const Header* expected);
  Work post_receive(Link& link, const at::Tensor& bytes);
  void post(Link& link, Header header, const std::vector<at::Tensor>& tensors);
  void match(Link& link);
  static void check(const Header& expected, const Header& header);
  int tag(MessageClass link_class, int64_t from, int64_t to) const;
  Failure lost_peer(int64_t peer) const;
  Failure broken_protocol(const Link& link, const std::string& what) const;
  std::vector<int64_t> control_peers() const;
  bool lost() const {
    return !failure_.empty();
  }
  bool idle() const;
  void stop(Link& link);
  void fail_with(const Failure& failure, int64_t except = -1);

  const TransportOptions options_;
  const int64_t rank_;
  const int64_t size_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;

  mutable std::mutex mutex_;        // guards all below
  std::condition_variable changed_; // a message came, left, or all is lost
  uint64_t step_ = 0;
  uint8_t flags_ = 0;
  bool stopping_ = false;
  std::string failure_;
  int64_t next_ticket_ = 0;
  std::map<int64_t, std::shared_ptr<Receipt>> receipts_;
  std::map<Key, std::unique_ptr<Link>> outgoing_;
  std::map<Key, std::unique_ptr<Link>> incoming_;
  std::mutex posting_; // keeps the order of posts and parcels the same
};

} // namespace torch_sm3::pipeline
