// SPDX-License-Identifier: Apache-2.0
#include <torch_sm3/pipeline/batch_threads.h>

#include <sched.h>

namespace torch_sm3::pipeline {
namespace {

// Sets the policy of this thread, which the threads that it starts inherit.
bool set_policy(int policy) {
  const sched_param no_priority{};
  return sched_setscheduler(0, policy, &no_priority) == 0;
}

} // namespace

BatchThreads::BatchThreads()
    : changed_(
          sched_getscheduler(0) == SCHED_OTHER && set_policy(SCHED_BATCH)) {}

BatchThreads::~BatchThreads() {
  if (changed_) {
    set_policy(SCHED_OTHER);
  }
}

} // namespace torch_sm3::pipeline
