// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/export.h>

namespace torch_sm3::pipeline {

/// Keeps the threads that this thread starts meanwhile from preempting others.
///
/// Make the Gloo group of a pipeline within the life of one:
///
/// \code
/// const BatchThreads guard;
/// auto gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, ranks);
/// \endcode
///
/// A message wakes the peer's Gloo thread. Where ranks share cores, that thread
/// would run at once in place of the sender, which holds the lock of its
/// connection; and the sender's own Gloo thread would poll for the lock for a
/// whole slice of the scheduler, milliseconds for a message of microseconds.
/// Threads of the policy SCHED_BATCH wait for the core instead.
///
/// Does nothing for a thread that has a policy of its own, or where policies
/// may not be set.
class TORCH_SM3_API BatchThreads {
 public:
  BatchThreads();
  ~BatchThreads();

  BatchThreads(const BatchThreads&) = delete;
  BatchThreads& operator=(const BatchThreads&) = delete;

 private:
  bool changed_ = false;
};

} // namespace torch_sm3::pipeline
