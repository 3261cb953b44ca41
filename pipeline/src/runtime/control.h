// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <runtime/interrupt.h>
#include <transport/values.h>

#include <torch_sm3/pipeline/runtime.h>

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

// The rank that hears all others and tells them what was heard.
inline constexpr int64_t kHub = 0;
// Waits are cut into slices of this length, in seconds.
inline constexpr double kSlice = 0.2;

// Ends everything after the links were lost.
class LinksLost : public std::exception {};

// Ends everything after a rank with the same stages was lost.
class ReplicaLost : public std::runtime_error {
 public:
  // `type` is what the failure is called on all ranks.
  ReplicaLost(const std::string& text, const char* type)
      : std::runtime_error(text), type_(type) {}
  const char* type() const {
    return type_;
  }

 private:
  const char* type_;
};

// Ends everything: no rank can be asked to go on with its part.
class Interrupted : public std::exception {};

// Sends a value; waits as long as the transport does.
void send_value(
    Transport& transport,
    int64_t peer,
    Channel channel,
    Header header,
    const Packed& value);

// Waits for a value. An interrupt ends the wait where `interrupts` is given.
c10::IValue receive_value(
    Transport& transport,
    int64_t peer,
    Channel channel,
    const Header& expected,
    Interrupts* interrupts = nullptr);

// Gives every rank the values of all of them, in rank order; for one rank
// `transport` is null.
std::vector<c10::IValue> exchange(
    Transport* transport,
    int64_t rank,
    int64_t ranks,
    const c10::IValue& own,
    Interrupts* interrupts = nullptr);

// Name of an exception's class, and its text without a trace.
std::string type_of(const std::exception& error);
std::string text_of(const std::exception& error);

} // namespace torch_sm3::pipeline
