// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <transport/lanes.h>

#include <torch_sm3/pipeline/transport.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace torch_sm3::pipeline {

inline std::chrono::nanoseconds in_seconds(double value) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(std::min(value, 1e9)));
}

// The queues and threads behind a Transport.
//
// The caller's own thread posts and waits wherever it can, because handing a
// message from thread to thread costs more than a small message takes. Threads
// exist for what must go on while the caller computes: one listens to the
// control messages of each control peer, one per link receives large payloads
// that nothing foretold and what was asked for long before its use, one wakes
// callers whose wait has lasted long enough, and one posts what a slow link
// holds back. Where tensors of a device have lanes, the links' threads receive
// all headers, and each posts what its header announces at once, in the order
// in which the messages of a peer were asked for: so nobody waits for such
// tensors but the streams that use them.
// Threads hold a shared pointer, so one that cannot be stopped never outlives
// what it uses.
class Transport::Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      TransportOptions options,
      std::shared_ptr<Lanes> lanes);

  void start();
  void begin(uint64_t step, bool evaluation);
  Outcome send(
      int64_t peer,
      Channel channel,
      Header header,
      const std::vector<at::Tensor>& tensors,
      double seconds);
  int64_t expect(int64_t peer, Channel channel, Header expected);
  void ask(int64_t ticket);
  Outcome wait(int64_t ticket, double seconds);
  Message take(int64_t ticket);
  int64_t pending() const;
  bool flush(double seconds);
  void fail(const std::string& structure);
  std::string failure();
  void close();

 private:
  using Clock = std::chrono::steady_clock;
  using Time = Clock::time_point;
  using Lock = std::unique_lock<std::mutex>;
  using Work = c10::intrusive_ptr<c10d::Work>;

  // Tags of a link.
  static constexpr int kFrameTag = 0;
  static constexpr int kRestTag = 1;
  static constexpr int kOfferTag = 2;
  static constexpr int kTags = 3;

  // What a message still waits for: its frame, a second frame, its payload.
  enum class Phase { kFrame, kHeader, kPayload };
  // A message that was announced.
  struct Receipt {
    int64_t peer = 0;
    Channel channel = Channel::kControl;
    Header expected;
    Phase phase = Phase::kFrame;
    std::deque<Work> works;          // that end the phase
    at::Tensor buffer;               // for the frame and a small payload
    at::Tensor second;               // for a second frame
    std::vector<at::Tensor> offer;   // for a payload like the one before
    bool asked = false;              // the payload may be received
    bool awaited = false;            // a caller waits for it
    bool threaded = false;           // the link's thread does the rest
    std::optional<Message> arriving; // its header is known
    std::optional<Message> message;
    bool unposted = false; // its tensors on a device are not on their way yet
    Lane::Arrival arrival; // those that are
    std::optional<Time> since; // start of the wait
  };
  // A transmission of its own: the bytes, and which of the link's tags it has.
  struct Part {
    at::Tensor bytes;
    int tag = kFrameTag;
  };
  // A message under way. The parts keep what the caller may drop meanwhile.
  struct Parcel {
    std::deque<Work> works;
    std::vector<Part> parts;
    std::optional<Time> due; // held back until then, nothing is posted yet
  };
  // One class of messages to one peer.
  struct Outgoing {
    int64_t peer = 0;
    int tag = 0;
    // Whether the receiver offers to take the like of the last message again;
    // control messages are received before anyone asks.
    bool foretells = true;
    std::vector<TensorMeta> layout; // what it is ready for, if anything
    std::deque<Parcel> parcels;     // posted and not known to have left
    std::optional<Time> full_since;
    std::chrono::nanoseconds delay{0};
  };
  // One class of messages from one peer. Frames are received ahead; what does
  // not fit a frame's buffer has a tag of its own and is received after the
  // header that describes it.
  //
  // Most large payloads have the types and shapes of the one before. So
  // whoever asks for the message after a large one offers at once to receive
  // the same again, on a third tag, and the sender, who knows of the offer by
  // the same rule, sends there: header and payload leave without an answer in
  // between. If its payload is another one it fills the offer with a byte for
  // each tensor and sends the payload on the second tag. So every offer is used
  // up by the one message that it was made for.
  struct Incoming {
    int64_t peer = 0;
    int tag = 0;
    std::deque<std::shared_ptr<Receipt>> queue; // announced, not here yet
    size_t posted = 0;              // of the first ones the frame may arrive
    std::vector<at::Tensor> spare;  // buffers for frames
    std::deque<Message> unasked;    // control messages that came first
    bool left = false;              // the peer closed its links
    std::vector<TensorMeta> layout; // of the last payload, if it was large
    bool large = false; // some message was too large for a frame's buffer
    // The last payload came after its header was read, or there was none yet.
    bool surprised = true;
    std::condition_variable wake;
    Work current; // what the thread waits for
    bool finished = false;
    std::thread thread;
  };
  // A caller that waits for work, until `limit`.
  struct Waiting {
    Work work;
    Time limit;
  };
  using Key = std::pair<int64_t, Channel>;
  // What a rank takes for the failure.
  struct Report {
    int64_t rank = 0;
    int64_t awaited = -1; // the silent rank, if that is the failure
    int64_t gone = -1;    // the rank that ended, if that is the failure
    std::string structure;
  };

  // Gloo closes all connections of a group when one wait times out, so no wait
  // of ours ever does: it is ended from outside, and the connections stay.
  static constexpr std::chrono::milliseconds kForever =
      std::chrono::hours(24 * 3650);
  // Frames of a link that may arrive before they are asked for: 1 MiB at most.
  static constexpr size_t kAhead = 16;
  // When fewer than these are left it is time for more, all at once: the sender
  // hears of each, and to hear of several together disturbs it once.
  static constexpr size_t kFew = 8;
  // Control messages of a peer that may arrive while this process does not run:
  // how steps ended, one of them later, and a report. What a rank says before
  // it leaves must not wait for the receive after that of another message.
  static constexpr size_t kControlAhead = 4;
  // How often waits are looked at. A caller with signals to serve waits in
  // slices of this order.
  static constexpr std::chrono::milliseconds kTick{50};
  // How long the hub waits for more reports.
  static constexpr std::chrono::milliseconds kCollect{250};
  // How long, or for the time of a message, a rank waits for the hub's verdict.
  static constexpr std::chrono::seconds kGrace{5};

  // For callers. Those that take a lock hold mutex_ meanwhile.
  Outgoing& outgoing(int64_t peer, Channel channel);
  Incoming& incoming(int64_t peer, Channel channel);
  Outcome await_room(
      Outgoing& link,
      Channel channel,
      const Header& header,
      double seconds);
  bool make_room(Lock& lock, Outgoing& link, size_t most, Time limit);
  bool wait_for(Lock& lock, const Work& work, Time limit);
  bool wait_once(Lock& lock, const Work& work, Time limit);
  bool patiently(Time limit, const std::function<bool(Time)>& wait);
  void progress(Lock& lock, Incoming& link, Time limit);
  static void let_others_run();
  void post_frames(Incoming& link);
  void pop(Incoming& link);
  static bool falls_behind(const Incoming& link);
  void next_message(Incoming& link);
  void offer(Incoming& link, Receipt& receipt);
  void hand_over();
  std::shared_ptr<Receipt> receipt_of(int64_t ticket) const;
  at::Tensor take_buffer(Incoming& link);
  void watch();
  Time limit_of(std::optional<Time>* since, double seconds) const;
  bool overdue(const std::optional<Time>& since) const;
  void fail_with(const Failure& failure, int64_t except = -1);
  void consider(Report report);
  void propose(const Report& report);
  void settle(const std::string& structure, int64_t except);
  void give_verdict(Lock& lock);
  std::string verdict() const;
  std::string verdict_of_hub() const;
  std::string silence_of_hub() const;
  void lose();
  void tell_all(const Header& header, int64_t except);
  Failure timed_out(
      bool sends,
      Channel channel,
      const Header& header,
      int64_t peer) const;
  std::vector<int64_t> control_peers() const;
  bool lost() const {
    return lost_;
  }

  // Messages on the wire, by callers and threads.
  static Parcel
  wrap(Outgoing& link, Header header, const std::vector<at::Tensor>& tensors);
  void post(Outgoing& link, Parcel parcel);
  void post_parcel(const Outgoing& link, Parcel& parcel);
  Work post_receive(const Incoming& link, const at::Tensor& bytes, int tag);
  Work advance(Incoming& link, Receipt& receipt);
  void open_frame(Incoming& link, Receipt& receipt);
  void open_header(Incoming& link, Receipt& receipt);
  bool complete(Incoming& link, Receipt& receipt);
  void launch(Incoming& link, void (Engine::*run)(Incoming&));
  void run_incoming(Incoming& link);
  void run_control(Incoming& link);
  void post_control(Incoming& link, std::deque<Receipt>& ahead);
  void run_delayed();
  std::optional<Time> post_due(int64_t* peer);
  bool await(Incoming& link, const Work& work);
  static void abort_wait(const Work& work);
  static bool wait_to_the_end(const Work& work);
  void match(Incoming& link);
  void announce_lane(Receipt& receipt) const;
  void post_lane(int64_t peer);
  void take_from_lane(const Receipt& receipt, Message& message);
  void stop(Incoming& link);
  int tag(Channel channel, int64_t from, int64_t to) const;
  Failure lost_peer(int64_t peer) const;
  Failure broken_protocol(const Incoming& link, const std::string& what) const;

  const TransportOptions options_;
  const int64_t rank_;
  const int64_t size_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<Lanes> lanes_; // null: all tensors are on the CPU
  std::mutex posting_; // keeps the order of posts and parcels the same

  mutable std::mutex mutex_;        // guards all below
  std::condition_variable changed_; // a message came, or all is lost
  std::condition_variable watching_;
  std::condition_variable delaying_; // a message was held back
  uint64_t step_ = 0;
  uint8_t flags_ = 0;
  int stuck_ = 0; // callers whose wait lasts
  bool stopping_ = false;
  bool lost_ = false;
  std::string failure_;            // what all ranks agree on
  std::vector<Report> reports_;    // for the hub
  bool hub_gone_ = false;          // for the others
  std::optional<Time> verdict_at_; // if the links are lost and it is open why
  int64_t next_ticket_ = 0;
  std::map<int64_t, std::shared_ptr<Receipt>> receipts_;
  std::map<Key, std::unique_ptr<Outgoing>> outgoing_;
  std::map<Key, std::unique_ptr<Incoming>> incoming_;
  // Messages of a peer in the order of their asks, from the first one whose
  // tensors may have to come by the lane.
  std::map<int64_t, std::deque<std::shared_ptr<Receipt>>> by_lane_;
  std::list<Waiting> waiting_;
  std::thread watcher_;
  std::thread delayer_; // runs if any link of this rank is to be slow
};

} // namespace torch_sm3::pipeline
