// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

/// \file
/// The frame that precedes every message, so that a longer, shorter, reordered
/// or differently typed message is an error instead of memory gone wrong.

namespace torch_sm3::pipeline {

/// Bytes of a header frame. What does not fit follows in a second frame whose
/// length the first one announces.
inline constexpr size_t kFrameBytes = 512;
/// Longest header that is accepted, second frame included.
inline constexpr size_t kMaxHeaderBytes = size_t{1} << 24;

/// Bytes that are no header of ours.
class TORCH_SM3_API HeaderError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What a message is; poison takes the place of the message that a failed rank
/// owes.
enum class MessageClass : uint8_t {
  kActivation = 0,
  kGradient = 1,
  kControl = 2,
  kPoison = 3,
  kSkip = 4, ///< of a route, in either direction
};

/// Flags of a header.
enum HeaderFlags : uint8_t {
  kEvaluation = 1, ///< sent by `eval`, not by `step`
  kAlarm = 2,      ///< control: the links are lost, with the reason
  kTogether = 4,   ///< the rest and the payload are in the same transmission
  kOffered = 8,    ///< the payload goes where the message before foretold it
  kGoodbye = 16,   ///< control: the sender closes its links, in order
  kReport = 32,    ///< control: a failure that the hub is to judge
};

/// Type, shape and differentiability of one tensor of a message.
struct TensorMeta {
  int8_t dtype = 0; ///< a c10::ScalarType
  bool requires_grad = false;
  std::vector<int64_t> sizes;
  /// Whether it is on the ranks' devices; then its elements do not travel with
  /// the frame but by a communicator of the devices.
  bool on_device = false;

  /// Whether there are no elements.
  bool empty() const {
    return std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  }

  /// Whether there are elements that travel with the frame.
  bool travels() const {
    return !on_device && !empty();
  }

  friend bool operator==(const TensorMeta&, const TensorMeta&) = default;
};

/// Everything about a message except the elements of its tensors.
struct Header {
  MessageClass message_class = MessageClass::kActivation;
  uint8_t flags = 0;
  uint64_t step = 0;
  uint32_t epoch = 0;
  uint32_t microbatch = 0;
  uint16_t source = 0; ///< producing stage
  uint16_t target = 0; ///< consuming stage
  std::vector<TensorMeta> tensors;
  /// Nesting of the value, and what in it is no tensor.
  std::string structure;

  friend bool operator==(const Header&, const Header&) = default;
};

/// Returns the length of what `encode` writes.
///
/// \param header the header
TORCH_SM3_API size_t encoded_bytes(const Header& header);

/// Writes a header: kFrameBytes bytes, or more if a second frame is needed.
///
/// \param header the header
/// \throws HeaderError if it would be longer than kMaxHeaderBytes
TORCH_SM3_API std::vector<uint8_t> encode(const Header& header);

/// Reads the part of fixed size: all but tensors and structure.
///
/// \param frame kFrameBytes bytes
/// \throws HeaderError unless magic, version, class and lengths are right
TORCH_SM3_API Header decode_fixed(const uint8_t* frame);

/// Returns the bytes of the second frame, zero if there is none.
///
/// \param frame a frame that decode_fixed accepts
TORCH_SM3_API size_t second_frame_bytes(const uint8_t* frame);

/// Reads a whole header.
///
/// \param bytes the first frame, followed by the second one if there is one
/// \throws HeaderError if the bytes are not exactly what `encode` writes
TORCH_SM3_API Header decode(const std::vector<uint8_t>& bytes);

/// Says in words what a header announces, for errors.
///
/// \param header the header
TORCH_SM3_API std::string describe(const Header& header);

} // namespace torch_sm3::pipeline
