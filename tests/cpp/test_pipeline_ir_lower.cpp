// SPDX-License-Identifier: Apache-2.0
// Lowering of schedules small enough to be lowered by hand.
#include <torch_sm3/pipeline/schedule.h>

#include <gtest/gtest.h>

namespace torch_sm3::pipeline {
namespace {

std::string lowered_rows(const std::string& text) {
  const std::string all = Schedule::parse(text).lower().text();
  return all.substr(all.find('\n') + 1);
}

TEST(PipelineLower, SplitBackwardsSendAfterTheInputGradient) {
  EXPECT_EQ(
      lowered_rows(
          "schedule 1 kind=x ranks=2 stages=2 microbatches=2 placement=loop\n"
          "rank 0: 0F0 0F1 0I0 0W0 0I1 0W1\n"
          "rank 1: 1F0 1I0 1F1 1I1 1W0 1W1\n"),
      "rank 0: 0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0I0 0W0 0RECV_B1 0I1 0W1 "
      "0REDUCE_GRAD OPTIM\n"
      "rank 1: 1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1 "
      "1REDUCE_GRAD OPTIM\n");
}

TEST(PipelineLower, PairsAreOneCellAndSendForwardFirst) {
  EXPECT_EQ(
      lowered_rows(
          "schedule 1 kind=x ranks=2 stages=4 microbatches=2 placement=v\n"
          "rank 0: 0F0 3F0 (0F1;3B0)OVERLAP_F_B 3F1 3B1 0B0 0B1\n"
          "rank 1: 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1\n"),
      "rank 0: 0F0 3RECV_F0 0SEND_F0 3F0 (0F1;3B0)OVERLAP_F_B 3RECV_F1 "
      "0SEND_F1 3SEND_B0 3F1 3B1 0RECV_B0 3SEND_B1 3REDUCE_GRAD 0B0 0RECV_B1 "
      "0B1 0REDUCE_GRAD OPTIM\n"
      "rank 1: 1RECV_F0 1F0 2F0 1RECV_F1 2SEND_F0 1F1 2F1 2RECV_B0 2SEND_F1 "
      "2B0 1B0 2RECV_B1 1SEND_B0 2B1 2REDUCE_GRAD 1B1 1SEND_B1 1REDUCE_GRAD "
      "OPTIM\n");
}

TEST(PipelineLower, RoutesHaveMessagesOfTheirOwn) {
  EXPECT_EQ(
      lowered_rows(
          "schedule 1 kind=x ranks=3 stages=3 microbatches=1 placement=loop "
          "routes=0>1,0>2\nrank 0: 0F0 0B0\nrank 1: 1F0 1B0\nrank 2: 2F0 "
          "2B0\n"),
      "rank 0: 0F0 0RECV_B0<2 0RECV_B0 0RECV_B0<1 0SEND_F0 0SEND_F0>1 "
      "0SEND_F0>2 0B0 0REDUCE_GRAD OPTIM\n"
      "rank 1: 1RECV_F0 1RECV_F0<0 1F0 1RECV_B0 1SEND_F0 1B0 1SEND_B0 "
      "1SEND_B0>0 1REDUCE_GRAD OPTIM\n"
      "rank 2: 2RECV_F0<0 2RECV_F0 2F0 2B0 2SEND_B0 2SEND_B0>0 2REDUCE_GRAD "
      "OPTIM\n");
}

// In a V the first and the last stage share rank 0; stage 1 has a tie with
// stage 0 over two ranks.
TEST(PipelineLower, TiesWaitForTheLastMemberAndReductionsForTheirTies) {
  EXPECT_EQ(
      lowered_rows(
          "schedule 1 kind=x ranks=2 stages=4 microbatches=1 placement=v "
          "ties=0+3,0+1\nrank 0: 0F0 3F0 3B0 0B0\nrank 1: 1F0 2F0 2B0 1B0\n"),
      "rank 0: 0F0 3RECV_F0 0SEND_F0 3F0 3B0 0RECV_B0 3SEND_B0 0B0 "
      "0TIE_REDUCE0 "
      "3REDUCE_GRAD 0TIE_REDUCE1 0REDUCE_GRAD OPTIM\n"
      "rank 1: 1RECV_F0 1F0 2F0 2RECV_B0 2SEND_F0 2B0 2REDUCE_GRAD 1B0 "
      "1SEND_B0 "
      "1TIE_REDUCE1 1REDUCE_GRAD OPTIM\n");
}

TEST(PipelineLower, WhatIsThereStaysAndWhatLacksIsAdded) {
  // Messages without collectives, as torch writes them.
  const std::string head =
      "schedule 1 kind=x ranks=2 stages=2 microbatches=1 placement=loop\n";
  EXPECT_EQ(
      lowered_rows(
          head + "rank 0: 0F0 0SEND_F0 0RECV_B0 0B0\n"
                 "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD\n"),
      "rank 0: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD OPTIM\n"
      "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD OPTIM\n");
  // Callbacks and the end of the step before stay where they are.
  EXPECT_EQ(
      lowered_rows(
          head + "rank 0: 0UNSHARD VALIDATE 0F0 . 0B0 0RESHARD OPTIM\n"
                 "rank 1: 1F0 1B0\n"),
      "rank 0: 0UNSHARD VALIDATE 0F0 0SEND_F0 . 0RECV_B0 0B0 0REDUCE_GRAD "
      "0RESHARD OPTIM\n"
      "rank 1: 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD OPTIM\n");
}

TEST(PipelineLower, ActionsThatMissGetNoMessage) {
  const std::string head =
      "schedule 1 kind=x ranks=3 stages=3 microbatches=2 placement=loop "
      "routes=0>2 ties=0+2\n";
  EXPECT_EQ(
      lowered_rows(head + "rank 0: 0F0 0F1\nrank 1: 1F0\nrank 2: 2F1\n"),
      "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1>2\nrank 1: 1RECV_F0 1F0\n"
      "rank 2: 2RECV_F1<0 2F1\n");
  EXPECT_THROW(
      Schedule::parse(
          "schedule 1 kind=x ranks=1 stages=1 microbatches=4294967295 "
          "placement=loop\nrank 0: 0F4294967294\n")
          .lower(),
      ScheduleError);
}

TEST(PipelineLower, OrdersThatCannotRunAreRefused) {
  const std::string head =
      "schedule 1 kind=x ranks=1 stages=2 microbatches=1 placement=loop\n"
      "rank 0: ";
  for (const char* row :
       {"1F0 0F0",
        "0F0 1F0 0B0 1B0",
        "0B0 0F0 1F0",
        "0F0 1F0 1W0 1I0",
        "0F0 (1F0;1B0)OVERLAP_F_B 0B0",
        "0F0 1F0 1B0 1I0",
        "0F0 1F0 1B0 1W0",
        "0F0 1F0 1I0 1W0 1W0",
        "0F0 0F0"}) {
    EXPECT_THROW(Schedule::parse(head + row).lower(), ScheduleError) << row;
  }
  std::string many =
      "schedule 1 kind=x ranks=40 stages=40 microbatches=1 placement=loop\n";
  for (int rank = 0; rank < 40; ++rank) {
    const std::string stage = std::to_string(rank);
    many += "rank ";
    many += stage;
    many += ": ";
    many += stage;
    many += "B0 ";
    many += stage;
    many += "F0\n";
  }
  try {
    Schedule::parse(many).lower();
    FAIL();
  } catch (const ScheduleError& error) {
    const std::string what = error.what();
    EXPECT_NE(
        what.find("rank 7 waits at 7B0 and 32 more ranks wait"),
        std::string::npos)
        << what;
  }
}

} // namespace
} // namespace torch_sm3::pipeline
