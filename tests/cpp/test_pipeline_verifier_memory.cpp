// SPDX-License-Identifier: Apache-2.0
// The verifier's count of bytes, and its options.
#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/simulator.h>
#include <torch_sm3/pipeline/verifier.h>

#include <gtest/gtest.h>

#include <limits>
#include <stdexcept>

namespace torch_sm3::pipeline {
namespace {

Schedule good() {
  return Schedule::parse(
      "schedule 1 kind=x ranks=2 stages=2 microbatches=2 placement=loop\n"
      "rank 0: 0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1 "
      "0REDUCE_GRAD OPTIM\n"
      "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 "
      "1REDUCE_GRAD OPTIM\n");
}

TEST(VerifierMemory, PeakIsExactAndNamesItsAction) {
  VerifyOptions options;
  StageCosts& costs = options.costs.stages[0];
  costs.activation_bytes = 100;
  costs.boundary_bytes = 10;
  costs.transient_bytes = 3;
  costs.static_bytes = 1000;
  const Report report = verify(good(), options);
  ASSERT_TRUE(report.valid());
  // Rank 0 at 0RECV_B0: two activations, outputs 0 and 1, the gradient that
  // comes. Rank 1 at 1B0: one activation, input 1, the gradient that is made.
  EXPECT_EQ(report.peak_bytes, (std::vector<double>{1230, 1123}));
  EXPECT_EQ(report.peak_at, (std::vector<size_t>{3, 3}));
  EXPECT_EQ(report.peak_actions, (std::vector<std::string>{"0RECV_B0", "1B0"}));
  EXPECT_EQ(
      live_bytes(good(), 0, options.costs),
      (std::vector<double>{
          1110, 1110, 1220, 1230, 1220, 1110, 1120, 1010, 1010, 1010}));

  options.memory_limit = {1230, 1100};
  const Report over = verify(good(), options);
  EXPECT_EQ(over.rule, Rule::kMemory);
  EXPECT_EQ(
      over.message,
      "verify: expected at most 1100 bytes on rank 1, but got 1123 at 1B0 "
      "(argument 'memory_limit')");
  EXPECT_EQ(over.peak_bytes, report.peak_bytes);
  EXPECT_NE(over.grid.find("[1B0]"), std::string::npos);
  options.memory_limit = {1230};
  EXPECT_TRUE(verify(good(), options).valid());
}

TEST(VerifierMemory, SplitBackwardGivesMemoryBackInTwoParts) {
  Costs costs;
  costs.stages[0].activation_bytes = 100;
  costs.stages[0].released_at_input = 60;
  Schedule schedule = Schedule::parse(
      "schedule 1 kind=x ranks=1 stages=1 microbatches=2 placement=loop\n"
      "rank 0: 0F0 0F1 0I0 0I1 0W0 0W1 0REDUCE_GRAD OPTIM\n");
  EXPECT_EQ(
      live_bytes(schedule, 0, costs),
      (std::vector<double>{100, 200, 140, 80, 40, 0, 0, 0}));
  // Without a backward nothing is kept.
  schedule.rows[0].resize(2);
  EXPECT_EQ(live_bytes(schedule, 0, costs), (std::vector<double>{0, 0}));
}

TEST(VerifierMemory, InputGradientsMayKeepMoreThanTheyLetGoOf) {
  Costs costs;
  costs.stages[0].activation_bytes = 100;
  costs.stages[0].released_at_input = -50;
  const Schedule schedule = Schedule::parse(
      "schedule 1 kind=x ranks=1 stages=1 microbatches=1 placement=loop\n"
      "rank 0: 0F0 0I0 0W0 0REDUCE_GRAD OPTIM\n");
  EXPECT_EQ(
      live_bytes(schedule, 0, costs), (std::vector<double>{100, 150, 0, 0, 0}));
}

// The output goes with the activation or with its message, whichever is last.
TEST(VerifierMemory, WhatOnlyInputGradientsKeepCountsToo) {
  VerifyOptions options;
  options.costs.stages[0].released_at_input = -50;
  const Schedule alone = plan({"zb_h1", 1, 3});
  EXPECT_EQ(
      verify(alone, options).peak_bytes,
      simulate(alone, options.costs).peak_bytes);
  EXPECT_EQ(verify(alone, options).peak_bytes, std::vector<double>{50});
}

TEST(VerifierMemory, SharedOutputsCountOnce) {
  Costs costs;
  costs.stages[0].activation_bytes = 100;
  costs.stages[0].boundary_bytes = 10;
  costs.stages[0].shared_bytes = 4;
  // Output 0 leaves at 0SEND_F1, before its backward; output 1 never does.
  EXPECT_EQ(
      live_bytes(good(), 0, costs),
      (std::vector<double>{106, 106, 212, 222, 216, 106, 116, 10, 10, 10}));
  LinkModel blocking{Links::kBlocking, 1};
  EXPECT_EQ(
      live_bytes(good(), 0, costs, blocking),
      (std::vector<double>{106, 100, 206, 216, 210, 100, 110, 0, 0, 0}));
  VerifyOptions options;
  options.costs = costs;
  options.costs.stages[0].shared_bytes = 11;
  EXPECT_THROW(verify(good(), options), std::invalid_argument);
}

TEST(VerifierMemory, WrongOptionsAreNamed) {
  const auto message = [](const VerifyOptions& options) -> std::string {
    try {
      verify(good(), options);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  VerifyOptions options;
  options.links.max_pending = 0;
  EXPECT_EQ(
      message(options),
      "verify: expected max_pending >= 1, but got 0 (argument 'max_pending')");
  options = {};
  options.memory_limit = {1};
  EXPECT_NE(message(options).find("but got none (argument"), std::string::npos);
  options.memory_limit = {1, 2, 3};
  EXPECT_NE(message(options).find("'memory_limit'"), std::string::npos);
  options = {};
  options.costs.stages.resize(3);
  EXPECT_NE(message(options).find("'stages'"), std::string::npos);
  options = {};
  options.costs.latency = {1, 2, 3};
  EXPECT_NE(message(options).find("'latency'"), std::string::npos);
  options = {};
  options.costs.stages[0].released_at_input = 1;
  EXPECT_NE(message(options).find("'released_at_input'"), std::string::npos);
  options = {};
  options.costs.stages[0].forward = std::numeric_limits<double>::quiet_NaN();
  EXPECT_NE(message(options).find("'forward'"), std::string::npos);
}

} // namespace
} // namespace torch_sm3::pipeline
