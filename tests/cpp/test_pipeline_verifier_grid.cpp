// SPDX-License-Identifier: Apache-2.0
// Counter-examples: the grid around each stuck rank, and who waits for whom.
#include <torch_sm3/pipeline/verifier.h>

#include <gtest/gtest.h>

namespace torch_sm3::pipeline {
namespace {

// torch 2.14.1 writes a 1F1B whose last rank runs F1 first.
TEST(VerifierGrid, OrderThatCannotRunIsShownWithItsCycle) {
  const Report report = verify(
      Schedule::parse(
          "schedule 1 kind=x ranks=2 stages=2 microbatches=2 placement=loop\n"
          "rank 0: 0F0 0B0 0F1 0B1\n"
          "rank 1: 1F1 1B1 1F0 1B0"));
  EXPECT_EQ(report.rule, Rule::kDependencies);
  EXPECT_EQ(
      report.message,
      "verify: expected dependencies without a cycle, but got one where rank "
      "0 waits at 0B0 for rank 1, which is stuck at 1F1 and waits for rank 0");
  EXPECT_EQ(
      report.grid,
      "step  rank 0  rank 1\n"
      "0     0F0     [1F1]\n"
      "1     [0B0]   1B1\n"
      "2     0F1     1F0\n"
      "3     0B1     1B0\n");
}

TEST(VerifierGrid, DeadlockIsShownAroundTheStuckRanks) {
  // Nobody posts a RECV before its second SEND.
  const Schedule schedule = Schedule::parse(
      "schedule 1 kind=x ranks=2 stages=4 microbatches=4 placement=0,1,1,0\n"
      "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0F3 0SEND_F3 3RECV_F0 "
      "3F0 3RECV_F1 3F1 3RECV_F2 3F2 3RECV_F3 3F3\n"
      "rank 1: 1RECV_F0 1F0 2F0 2SEND_F0 1RECV_F1 1F1 2F1 2SEND_F1 1RECV_F2 "
      "1F2 2F2 2SEND_F2 1RECV_F3 1F3 2F3 2SEND_F3\n");
  VerifyOptions options;
  options.full_grid = true;
  const Report report = verify(schedule, options);
  EXPECT_EQ(report.rule, Rule::kDeadlock);
  EXPECT_EQ(
      report.message,
      "verify: expected an order in which nobody waits for ever, but got one "
      "where rank 0 waits at 0SEND_F3 for rank 1, which is stuck at 2SEND_F1 "
      "and waits for rank 0");
  EXPECT_EQ(
      report.grid,
      "step  rank 0      rank 1\n"
      "...\n"
      "4     0F2         1RECV_F1\n"
      "5     0SEND_F2    1F1\n"
      "6     0F3         2F1\n"
      "7     [0SEND_F3]  [2SEND_F1]\n"
      "8     3RECV_F0    1RECV_F2\n"
      "9     3F0         1F2\n"
      "10    3RECV_F1    2F2\n");
  EXPECT_NE(report.full_grid.find("\n15 "), std::string::npos);
  options.links.links = Links::kBlocking;
  EXPECT_EQ(verify(schedule, options).rule, Rule::kDeadlock);
  options.links = {Links::kRendezvous, 2};
  EXPECT_TRUE(verify(schedule, options).valid());
  options.links.links = Links::kPosted;
  EXPECT_TRUE(verify(schedule, options).valid());
}

TEST(VerifierGrid, StuckRanksFarApartEachHaveTheirWindow) {
  // Rank 0 is stuck at its first action, rank 1 long after.
  const Report report = verify(
      Schedule::parse(
          "schedule 1 kind=x ranks=2 stages=3 microbatches=8 placement=1,0,1\n"
          "rank 0: 1F7 1F0 1F1 1F2 1F3 1F4 1F5 1F6\n"
          "rank 1: 0F0 0F1 0F2 0F3 0F4 0F5 0F6 . . . 2F0 0F7 2F1 2F2 2F3 2F4 "
          "2F5 "
          "2F6 2F7\n"));
  EXPECT_EQ(report.rule, Rule::kDependencies);
  EXPECT_EQ(
      report.grid,
      "step  rank 0  rank 1\n"
      "0     [1F7]   0F0\n"
      "1     1F0     0F1\n"
      "2     1F1     0F2\n"
      "3     1F2     0F3\n"
      "...\n"
      "7     1F6     .\n"
      "8             .\n"
      "9             .\n"
      "10            [2F0]\n"
      "11            0F7\n"
      "12            2F1\n"
      "13            2F2\n");
}

} // namespace
} // namespace torch_sm3::pipeline
