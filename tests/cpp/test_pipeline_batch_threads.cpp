// SPDX-License-Identifier: Apache-2.0
// Threads that leave the core to whoever computes.
#include <torch_sm3/pipeline/batch_threads.h>

#include <gtest/gtest.h>

#include <sched.h>

#include <thread>

namespace torch_sm3::pipeline {
namespace {

int policy_of_a_new_thread() {
  int policy = -1;
  std::thread([&] { policy = sched_getscheduler(0); }).join();
  return policy;
}

void set_own_policy(int policy) {
  const sched_param no_priority{};
  ASSERT_EQ(sched_setscheduler(0, policy, &no_priority), 0);
}

TEST(PipelineBatchThreads, are_those_that_start_meanwhile) {
  ASSERT_EQ(sched_getscheduler(0), SCHED_OTHER);
  {
    const BatchThreads guard;
    EXPECT_EQ(policy_of_a_new_thread(), SCHED_BATCH);
    {
      const BatchThreads again;
      EXPECT_EQ(policy_of_a_new_thread(), SCHED_BATCH);
    }
    EXPECT_EQ(policy_of_a_new_thread(), SCHED_BATCH);
  }
  EXPECT_EQ(sched_getscheduler(0), SCHED_OTHER);
  EXPECT_EQ(policy_of_a_new_thread(), SCHED_OTHER);
}

TEST(PipelineBatchThreads, leave_a_policy_of_its_own_to_a_thread) {
  std::thread([] {
    set_own_policy(SCHED_IDLE);
    {
      const BatchThreads guard;
      EXPECT_EQ(sched_getscheduler(0), SCHED_IDLE);
    }
    EXPECT_EQ(sched_getscheduler(0), SCHED_IDLE);
  }).join();
}

} // namespace
} // namespace torch_sm3::pipeline
