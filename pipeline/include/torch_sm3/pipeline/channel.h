// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/header.h>

#include <cstdint>

namespace torch_sm3::pipeline {

/// What kind of message travels from one rank to another. Messages of one
/// channel arrive in the order of their sends; each route has two of its own,
/// so that its messages need not wait for those between neighbours.
enum class Channel : uint32_t {
  kActivation = 0, ///< a stage's output, to its successor
  kGradient = 1,   ///< the gradient of it, back
  kControl = 2,    ///< between runners, outside the schedule
  kRoutes = 3,     ///< of the routes: see channel_of_route
};

/// Most routes that a schedule may have.
inline constexpr uint32_t kMaxRoutes = 254;

/// Returns the channel of a route's values or of their gradients.
///
/// \param route    number of the route in `Schedule::routes`
/// \param backward whether gradients travel
constexpr Channel channel_of_route(uint32_t route, bool backward) {
  return static_cast<Channel>(
      static_cast<uint32_t>(Channel::kRoutes) + 2 * route + (backward ? 1 : 0));
}

/// Returns the class that the headers of a channel name.
///
/// \param channel the channel
constexpr MessageClass class_of(Channel channel) {
  return channel < Channel::kRoutes
             ? static_cast<MessageClass>(static_cast<uint32_t>(channel))
             : MessageClass::kSkip;
}

} // namespace torch_sm3::pipeline
