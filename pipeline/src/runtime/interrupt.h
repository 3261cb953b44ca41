// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/runtime.h>

#include <cstdint>

namespace torch_sm3::pipeline {

// In place of an exception's class, as in Python.
inline constexpr const char* kInterrupted = "KeyboardInterrupt";

// Tells a call that it was interrupted since it began.
class Interrupts {
 public:
  Interrupts();

  // Whether there was another one since the last question.
  bool take();

 private:
  uint32_t seen_;
};

// While one lives, SIGINT interrupts before it does what it did: Python only
// notes the signal, and would serve it once the library returns. A program that
// leaves SIGINT alone ends by it, and its peers learn that it is lost.
class InterruptOnSignal {
 public:
  InterruptOnSignal();
  ~InterruptOnSignal();
  InterruptOnSignal(const InterruptOnSignal&) = delete;
  InterruptOnSignal& operator=(const InterruptOnSignal&) = delete;
};

} // namespace torch_sm3::pipeline
