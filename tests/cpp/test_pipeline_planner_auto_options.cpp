// SPDX-License-Identifier: Apache-2.0
// The kind `auto`: options that are given, and costs of other stages than it
// plans.
#include <pipeline_auto.h>
#include <torch_sm3/pipeline/simulator.h>
#include <torch_sm3/pipeline/verifier.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace torch_sm3::pipeline {
namespace {

TEST(PlannerAuto, KeepsToWhatIsGiven) {
  PlanOptions options = automatic(2, 6, {stage(1, 1, 1, 1)});
  options.chunks = 3;
  options.group_size = 6;
  const Choice looped = search(options);
  EXPECT_EQ(looped.schedule.stages, 6u);
  // The costs are those of a stage: three for each rank.
  EXPECT_GE(chosen(looped).makespan, 3 * 6 * 3);
  for (const Candidate& candidate : looped.alternatives) {
    EXPECT_NE(candidate.plan.find("chunks=3"), std::string::npos);
    if (candidate.plan.rfind("interleaved", 0) == 0) {
      EXPECT_EQ(candidate.plan, "interleaved chunks=3 group_size=6");
    }
  }
  options.chunks = 1;
  options.warmup = 2;
  for (const Candidate& candidate : search(options).alternatives) {
    if (candidate.plan.rfind("1f1b", 0) == 0) {
      EXPECT_EQ(candidate.plan, "1f1b warmup=2");
    }
  }
  options.kind = "gpipe";
  EXPECT_THROW(search(options), std::invalid_argument);
}

TEST(PlannerAuto, PutsStagesTogether) {
  // Eight stages on two ranks: as they are, in twos and in fours.
  std::vector<StageCosts> stages;
  for (int s = 0; s < 8; ++s) {
    stages.push_back(stage(1 + s, 1, 0.5, s));
    stages.back().boundary_bytes = s;
  }
  stages[3].backward = 1;
  const PlanOptions options = automatic(2, 4, stages);
  std::set<std::string> chunks;
  for (const Candidate& candidate : search(options).alternatives) {
    if (!candidate.refused.empty()) {
      EXPECT_EQ(candidate.plan, "chunks=3");
      EXPECT_EQ(
          candidate.refused,
          "the costs of 8 stages cannot be put together into 6");
    }
    chunks.insert(candidate.plan.substr(0, candidate.plan.find(' ')));
  }
  EXPECT_TRUE(chunks.count("looped_bfs") == 1 && chunks.count("zbv") == 1);
  const Choice choice = search(options);
  ASSERT_EQ(choice.costs.stages.size(), choice.schedule.stages);
  StageCosts sum = stage(0, 0, 0, 0);
  for (const StageCosts& of : choice.costs.stages) {
    sum.forward += of.forward;
    sum.input += of.input;
    sum.weight += of.weight;
    sum.activation_bytes += of.activation_bytes;
  }
  EXPECT_EQ(sum.forward, 36);
  EXPECT_EQ(sum.input, 8);
  EXPECT_EQ(sum.weight, 4);
  EXPECT_EQ(sum.activation_bytes, 28);
  // The border of a stage is that of its last part.
  const size_t parts = 8 / choice.costs.stages.size();
  EXPECT_EQ(choice.costs.stages[0].boundary_bytes, parts - 1);
  // The fourth stage has a backward of its own, cheaper than its halves.
  const StageCosts& fourth = choice.costs.stages[3 / parts];
  ASSERT_TRUE(fourth.backward.has_value());
  EXPECT_EQ(fourth.full_backward(), fourth.input + fourth.weight - 0.5);
  EXPECT_THROW(search(automatic(3, 4, stages)), std::invalid_argument);
}

TEST(PlannerAuto, SplitsWhereTheCostsAreSplit) {
  // Counted in ranks' shares: half of the model is the encoder.
  PlanOptions options = automatic(2, 4, {stage(1, 1, 1, 1)});
  options.split = 1;
  options.via = "direct";
  Choice choice = search(options);
  const auto stages = static_cast<uint16_t>(choice.schedule.stages);
  for (const Route& route : choice.schedule.routes) {
    EXPECT_EQ(route.source, stages / 2 - 1);
  }
  EXPECT_EQ(choice.schedule.routes.size(), stages / 2 - 1u);
  // Counted in the stages of the costs: not all can be put together.
  options.costs->stages.resize(4);
  options.split = 3;
  choice = search(options);
  EXPECT_EQ(choice.schedule.stages, 4u);
  EXPECT_EQ(choice.alternatives[0].plan, "chunks=1");
  EXPECT_EQ(
      choice.alternatives[0].refused, "the decoder would begin within a stage");
  options.split = 4;
  EXPECT_THROW(search(options), std::invalid_argument);
  options.costs->stages.resize(10);
  options.split = 1;
  EXPECT_EQ(search(options).schedule.stages, 10u);
  // A forced group that deadlocks, and no kind but interleaved to take.
  options = automatic(4, 5, {stage(1, 1, 1, 1)});
  options.chunks = 3;
  options.group_size = 4;
  for (const Candidate& candidate : search(options).alternatives) {
    if (candidate.plan.rfind("interleaved", 0) == 0) {
      EXPECT_NE(candidate.refused, "");
    }
  }
}

TEST(PlannerAuto, PlansRoutesAndOneRankAlone) {
  PlanOptions options = automatic(3, 5, {stage(1, 1, 1, 1)});
  options.split = 1;
  options.via = "direct";
  options.chunks = 1;
  const Schedule whole = plan(options);
  EXPECT_EQ(whole.routes, (std::vector<Route>{{0, 2}}));
  EXPECT_TRUE(verify(whole).valid());
  for (int64_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(plan_rank(options, rank), whole.rows[static_cast<size_t>(rank)]);
  }
}

} // namespace
} // namespace torch_sm3::pipeline
