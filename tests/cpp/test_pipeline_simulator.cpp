// SPDX-License-Identifier: Apache-2.0
// Simulated times against ones worked out by hand; tests/python compares random
// schedules with the oracle.
#include <pipeline_costs.h>

#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/simulator.h>
#include <torch_sm3/pipeline/verifier.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace torch_sm3::pipeline {
namespace {

Schedule two_ranks(const std::string& rows, const std::string& more = "") {
  return Schedule::parse(
      "schedule 1 kind=x ranks=2 stages=2 microbatches=2 placement=loop" +
      more + "\n" + rows);
}

constexpr char kLowered[] =
    "rank 0: 0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1 0REDUCE_GRAD "
    "OPTIM\n"
    "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD "
    "OPTIM\n";

TEST(Simulator, GpipeAnd1f1bHaveTheirFormulas) {
  for (int64_t p = 1; p <= 5; ++p) {
    for (int64_t m = 1; m <= 3 * p; ++m) {
      for (const char* kind : {"gpipe", "1f1b"}) {
        const Costs costs = stage_costs(1, 1.25, 0.5);
        const Simulation found = simulate(plan({kind, p, m}), costs);
        const auto work = static_cast<double>(m) * 2.75;
        EXPECT_DOUBLE_EQ(
            found.makespan, work + static_cast<double>(p - 1) * 2.75);
        EXPECT_LE(found.lower_bound, found.makespan);
        for (size_t rank = 0; rank < found.busy.size(); ++rank) {
          EXPECT_DOUBLE_EQ(found.busy[rank], work);
          EXPECT_DOUBLE_EQ(found.idle[rank], found.makespan - found.busy[rank]);
        }
        const auto in_flight = *kind == 'g' ? m : std::min(p, m);
        EXPECT_EQ(found.peak_bytes[0], static_cast<double>(in_flight));
      }
    }
  }
}

// With p ranks that all have the same work, the bound of the last is exact.
TEST(Simulator, BoundIsReachedBy1f1b) {
  const Simulation found = simulate(plan({"1f1b", 4, 8}), stage_costs(1, 1, 1));
  EXPECT_DOUBLE_EQ(found.lower_bound, found.makespan);
}

TEST(Simulator, LatencyCountsFromTheSend) {
  Costs costs = stage_costs(1, 1, 1);
  costs.latency = {0.5};
  const Simulation found = simulate(two_ranks(kLowered), costs, {}, true);
  // 0F0 ends at 1, so 1F0 runs from 1.5; 1B0 from 2.5 to 4.5; 0B0 from 5 to 7.
  EXPECT_EQ(found.timeline[1][1].start, 1.5);
  EXPECT_EQ(found.timeline[0][5].start, 5);
  // Each way has its own latency: [from * p + to].
  costs.latency = {0, 0.5, 0.25, 0};
  EXPECT_EQ(
      simulate(two_ranks(kLowered), costs, {}, true).timeline[0][5].start,
      4.75);
  costs.latency = {0.5, 0.25};
  EXPECT_EQ(
      simulate(two_ranks(kLowered), costs, {}, true).timeline[0][5].start,
      4.75);
}

TEST(Simulator, BandwidthAddsTheTimeOfTheBytes) {
  Costs costs = stage_costs(1, 1, 1);
  costs.stages[0].boundary_bytes = 8;
  costs.bandwidth = {4};
  const Simulation found = simulate(two_ranks(kLowered), costs, {}, true);
  EXPECT_EQ(found.timeline[1][1].start, 3);
}

TEST(Simulator, SerialLinksCarryOneMessageAtATime) {
  // Both forwards leave at 1 and 2, each under way for 4.
  Costs costs = stage_costs(1, 1, 1);
  costs.latency = {4};
  const Schedule schedule = plan({"forward", 2, 2});
  EXPECT_EQ(simulate(schedule, costs).makespan, 7);
  costs.serial_links = true;
  EXPECT_EQ(simulate(schedule, costs).makespan, 10);
}

TEST(Simulator, LinkModelsLetARankWait) {
  // The receiver posts its RECVs late: at 2 and 4.
  const Schedule schedule = Schedule::parse(
      "schedule 1 kind=x ranks=2 stages=3 microbatches=2 placement=0,1,1\n"
      "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1\n"
      "rank 1: 1RECV_F0 1F0 2F0 1RECV_F1 1F1 2F1\n");
  const auto sends = [&](LinkModel links) {
    const Simulation found =
        simulate(schedule, stage_costs(1, 1, 1), links, true);
    EXPECT_EQ(found.makespan, 5);
    return found.timeline[0][3];
  };
  EXPECT_EQ(sends({Links::kPosted, 1}).end, 2);
  EXPECT_EQ(sends({Links::kRendezvous, 1}).end, 2);
  EXPECT_EQ(sends({Links::kBlocking, 1}).start, 2);
  EXPECT_EQ(sends({Links::kBlocking, 1}).end, 3);
}

TEST(Simulator, RanksHaveTheirSpeedAndStagesTheirCosts) {
  Costs costs = stage_costs(1, 1, 1);
  costs.speed = {1, 2};
  const Simulation found = simulate(plan({"1f1b", 2, 2}), costs);
  EXPECT_EQ(found.busy, (std::vector<double>{6, 3}));
  costs.speed = {1};
  costs.stages.resize(2, costs.stages[0]);
  costs.stages[1].forward = 5;
  costs.stages[1].backward = 1;
  EXPECT_EQ(
      simulate(plan({"1f1b", 2, 2}), costs).busy, (std::vector<double>{6, 12}));
}

TEST(Simulator, JitterIsTheSameForOneSeedAndOnlyAdds) {
  Costs costs = stage_costs(1, 1, 1);
  costs.jitter = 0.2;
  const Schedule schedule = plan({"zb_h1", 4, 8});
  const Simulation one = simulate(schedule, costs);
  EXPECT_EQ(one.makespan, simulate(schedule, costs).makespan);
  costs.seed = 1;
  EXPECT_NE(one.makespan, simulate(schedule, costs).makespan);
  for (const double busy : one.busy) {
    EXPECT_GT(busy, 24);
    EXPECT_LT(busy, 24 * 1.2);
  }
}

TEST(Simulator, CollectivesTakeTimeAndTiesMeet) {
  Schedule schedule = plan({"1f1b", 2, 1});
  schedule.ties = {{0, 1}};
  Costs costs = stage_costs(1, 1, 1);
  costs.tie = {10};
  costs.stages[0].reduce = 3;
  costs.stages[0].optimizer = 0.5;
  Simulation found = simulate(schedule, costs);
  // 0B0 ends at 6; both ranks reduce the tie from there.
  EXPECT_EQ(found.makespan, 6 + 10 + 3 + 0.5);
  EXPECT_EQ(found.own_idle[1], 2);
  schedule.ties.clear();
  found = simulate(schedule, costs);
  EXPECT_EQ(found.own_idle[1], 0);
  costs.optimizer_waits = true;
  found = simulate(schedule, costs);
  EXPECT_EQ(found.makespan, 6 + 3 + 0.5);
  EXPECT_EQ(found.own_idle[1], 2);
}

TEST(Simulator, PairsRunAsOneOrLetTheirForwardGoFirst) {
  const Schedule schedule = Schedule::parse(
      "schedule 1 kind=x ranks=2 stages=3 microbatches=2 placement=0,1,0\n"
      "rank 0: 0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1\n"
      "rank 1: 1F0 (1F1;1B0)OVERLAP_F_B 1B1\n");
  Costs costs = stage_costs(1, 1, 1);
  // Rank 1 is free at 2, but 2B0 ends at 5 only; 2F1 then waits for 1F1.
  Simulation found = simulate(schedule, costs);
  EXPECT_EQ(found.makespan, 12);
  costs.stages[0].pair = 2.5;
  found = simulate(schedule, costs, {}, true);
  EXPECT_EQ(found.busy[1], 1 + 2.5 + 2);
  const Schedule lowered = schedule.lower();
  const auto& row = lowered.rows[1];
  const auto pair = std::find_if(row.begin(), row.end(), [](Action a) {
    return is_compute(a.op) && a.flags == kPaired;
  });
  const auto at = static_cast<size_t>(pair - row.begin());
  EXPECT_EQ(found.timeline[1][at].start, found.timeline[1][at + 1].start);
  EXPECT_EQ(found.timeline[1][at].end, found.timeline[1][at + 1].end);
}

TEST(Simulator, BytesAreTheVerifiers) {
  for (const std::string& kind : kinds()) {
    if (kind == "none" || kind == "auto") {
      continue;
    }
    const Schedule schedule = plan({kind, 3, 7});
    VerifyOptions options;
    options.costs = stage_costs(1, 1, 1);
    options.costs.stages[0].activation_bytes = 97;
    options.costs.stages[0].released_at_input = 31;
    options.costs.stages[0].boundary_bytes = 13;
    options.costs.stages[0].transient_bytes = 5;
    for (const int64_t pending : {1, 3}) {
      options.links.max_pending = pending;
      EXPECT_EQ(
          simulate(schedule, options.costs, options.links).peak_bytes,
          verify(schedule, options).peak_bytes);
    }
  }
}

TEST(Simulator, NoPlanBeatsItsLowerBound) {
  Costs costs = stage_costs(1, 1.5, 0.75);
  costs.latency = {0.1};
  for (const std::string& kind : kinds()) {
    for (const int64_t p : {2, 3, 5}) {
      if (kind != "none" && kind != "auto") {
        const Simulation found = simulate(plan({kind, p, 11}), costs);
        EXPECT_LE(found.lower_bound, found.makespan + 1e-9) << kind << p;
        EXPECT_GT(
            found.lower_bound,
            *std::max_element(found.busy.begin(), found.busy.end()));
      }
    }
  }
}

TEST(Simulator, WhatCannotRunIsRefusedWithItsCycle) {
  const Schedule cycle = two_ranks(
      "rank 0: 0F0 0B0 0F1 0B1\n"
      "rank 1: 1F1 1B1 1F0 1B0\n");
  try {
    simulate(cycle);
    FAIL();
  } catch (const ScheduleError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("rank 0 waits at 0B0 for rank 1"), std::string::npos);
    EXPECT_NE(text.find("[1F1]"), std::string::npos);
  }
  Costs costs;
  costs.jitter = -1;
  EXPECT_THROW(simulate(plan({"1f1b", 2, 2}), costs), std::invalid_argument);
}

// Time and memory grow with the number of actions and nothing else.
TEST(Simulator, LongSchedulesHaveTheFormulaToo) {
  const Simulation found =
      simulate(plan({"1f1b", 64, 2048}), stage_costs(1, 1, 1));
  EXPECT_EQ(found.makespan, 3 * (2048 + 63));
  EXPECT_EQ(found.peak_bytes[0], 64);
}

} // namespace
} // namespace torch_sm3::pipeline
