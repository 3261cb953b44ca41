// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace torch_sm3::pipeline {

// The stream of one lane and its events, as far as a Lane needs them. Nothing
// here waits on the host.
class LaneStream {
 public:
  // A point of the lane's stream.
  using Mark = std::shared_ptr<void>;

  virtual ~LaneStream() = default;

  // Whether there is no stream, so that waits are the host's.
  virtual bool on_host() const {
    return false;
  }
  // Lets the lane wait for all that the caller's stream was given so far.
  virtual void follow_caller() = 0;
  // Runs `enqueue` with the lane's stream as the current one; returns the point
  // behind it.
  virtual Mark run(const std::function<void()>& enqueue) = 0;
  // Lets the caller's stream wait for a point.
  virtual void join(const Mark& mark) = 0;
  // Keeps the memory of a tensor, made in the lane, until the caller's stream
  // has used it.
  virtual void lend(const at::Tensor& tensor) = 0;
  // Keeps the memory of a tensor, made elsewhere, until the lane has used it.
  virtual void keep(const at::Tensor& tensor) = 0;
  // Whether a point has been reached.
  virtual bool passed(const Mark& mark) = 0;
};

// A stream of its own on a device; on the CPU, which has none, the caller's
// order.
std::unique_ptr<LaneStream> make_lane_stream(c10::Device device);

} // namespace torch_sm3::pipeline
