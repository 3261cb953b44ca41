// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>
#include <torch_sm3/pipeline/channel.h>
#include <torch_sm3/pipeline/header.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch_sm3::pipeline {

/// A received message.
struct Message {
  Header header;
  std::vector<at::Tensor> tensors;
};

/// Why all ranks stop: who failed, where, and how.
struct Failure {
  int64_t rank = 0;
  int64_t stage = 0;
  int64_t microbatch = 0;
  std::string action;
  std::string error_type;
  std::string message;
  int64_t awaited = -1; ///< rank that was silent; other ranks are not told
};

/// Writes a failure in the form in which values travel in headers.
///
/// \param failure the failure
TORCH_SM3_API std::string structure_of(const Failure& failure);

class Lanes;

/// Settings of a Transport.
struct TransportOptions {
  /// Longest wait for one message, in seconds; independent of the group's.
  double timeout = 60.0;
  /// Sends of one channel to one peer that may be under way at once.
  int64_t max_pending = 2;
  /// Rank that the others report to.
  int64_t hub = 0;
  /// First stage of each rank, for failures that concern a rank as a whole.
  std::vector<int64_t> first_stage;
  /// Seconds by which messages from the first rank to the second are held back
  /// (not control messages): a slow link, for tests and measurements.
  std::map<std::pair<int64_t, int64_t>, double> link_delay;
};

/// How a wait ended.
enum class Outcome : int64_t {
  kPending = 0, ///< not yet: call again
  kDone = 1,
  kLost = 2, ///< the links are lost: see Transport::failure
};

/// Framed messages between the ranks of one process group.
///
/// Every message is a header frame and then its tensors; a small payload
/// travels in one transmission with the frame. Each channel to a peer has tags
/// of its own, and a large payload moves while the caller computes. The
/// receiver is ready for a payload like that of the message before as soon as
/// it asks, so that such a one need not wait for its header to be read. Waits
/// end when the caller says, without Python, so a caller with signals to serve
/// waits in slices. One caller at a time may use a channel. The group must be
/// able to end a wait, as Gloo is; with another a wait lasts until its message
/// comes.
///
/// Each rank listens for control messages of the hub, the hub for those of all.
/// When a peer ends, falls silent or sends what was not asked for, the links
/// are lost, once and for all: the hub decides what all ranks call the failure,
/// and every wait on every rank ends. If the hub itself does not answer, that
/// is the failure. A rank that closes its links says so, which is no failure
/// unless something was still to come from it.
///
/// Tensors of a device are not copied to the CPU: their headers travel as all
/// others, and their elements by a communicator of each directed link. Such
/// communicators match by order only, so the messages of the schedule between
/// two ranks must be asked for in the order of their sends, whatever their
/// channels. The host waits for the header; that tensors have come, the stream
/// waits which is current when they are taken.
class TORCH_SM3_API Transport {
 public:
  /// Starts listening.
  ///
  /// \param group   the ranks; used by nothing else from now on
  /// \param options settings, equal on all ranks
  /// \param lanes   what moves tensors of this rank's device; null if all are
  ///                on the CPU
  Transport(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      TransportOptions options,
      std::shared_ptr<Lanes> lanes = nullptr);
  /// Closes.
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  /// Sets what the headers of later calls carry.
  ///
  /// \param step       number of the step, equal on all ranks
  /// \param evaluation whether it is an `eval`
  void begin(uint64_t step, bool evaluation);

  /// Posts a message as soon as its channel has room; keeps the storage of the
  /// tensors alive until they have left.
  ///
  /// \param peer    receiving rank
  /// \param channel what kind of message
  /// \param header  stages, microbatch, structure, and kPoison as its class or
  ///                anything else for the channel's; the rest is filled in,
  ///                requires_grad from `tensors`
  /// \param tensors payload, dense tensors on the CPU or on the lanes' device
  /// \param seconds longest wait for room
  Outcome send(
      int64_t peer,
      Channel channel,
      Header header,
      const std::vector<at::Tensor>& tensors,
      double seconds);

  /// Announces the next message of a channel. Its header, and with it a small
  /// payload, may arrive ahead, so that its sender need not wait.
  ///
  /// \param peer     sending rank
  /// \param channel  what kind of message
  /// \param expected stages and microbatch that the header must name
  /// \return a ticket for `ask`, `wait` and `take`
  int64_t expect(int64_t peer, Channel channel, Header expected);

  /// Asks for a message that was announced; its tensors arrive in the
  /// background. The messages of a channel are asked for in order.
  ///
  /// \param ticket what `expect` returned
  void ask(int64_t ticket);

  /// Announces the next message of a channel and asks for it at once.
  ///
  /// \param peer     sending rank
  /// \param channel  what kind of message
  /// \param expected stages and microbatch that the header must name
  /// \return a ticket for `wait` and `take`
  int64_t receive(int64_t peer, Channel channel, Header expected);

  /// Waits for a message.
  ///
  /// \param ticket  of a message that was asked for
  /// \param seconds longest wait in this call
  Outcome wait(int64_t ticket, double seconds);

  /// Takes a message that has arrived.
  ///
  /// \param ticket a ticket for which `wait` returned kDone
  Message take(int64_t ticket);

  /// Returns the number of messages that are not known to have left.
  int64_t pending() const;

  /// Waits until all that was sent has left.
  ///
  /// \param seconds longest wait
  /// \return whether it has
  bool flush(double seconds);

  /// Declares the links lost; see `failure` for what all ranks agree on.
  ///
  /// \param structure the failure, see structure_of
  void fail(const std::string& structure);

  /// Why the links are lost: the structure of a Failure, empty if they are not.
  /// Waits until the ranks agree, a few seconds at most.
  std::string failure() const;

  /// Stops all threads and lets the group go. Idempotent.
  void close();

 private:
  class Engine;
  std::shared_ptr<Engine> engine_;
};

} // namespace torch_sm3::pipeline
