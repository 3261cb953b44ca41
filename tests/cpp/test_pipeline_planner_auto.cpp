// SPDX-License-Identifier: Apache-2.0
// The kind `auto`: what it takes, what it says of the rest, and what it
// refuses.
#include <torch_sm3/pipeline/search.h>
#include <torch_sm3/pipeline/simulator.h>
#include <torch_sm3/pipeline/verifier.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace torch_sm3::pipeline {
namespace {

StageCosts stage(double forward, double input, double weight, double bytes) {
  StageCosts costs;
  costs.forward = forward;
  costs.input = input;
  costs.weight = weight;
  costs.activation_bytes = bytes;
  return costs;
}

PlanOptions automatic(
    int64_t ranks,
    int64_t microbatches,
    std::vector<StageCosts> stages,
    std::vector<double> limits = {}) {
  PlanOptions options{
      .kind = "auto", .ranks = ranks, .microbatches = microbatches};
  options.costs.emplace();
  options.costs->stages = std::move(stages);
  options.memory_limit = std::move(limits);
  return options;
}

const Candidate& chosen(const Choice& choice) {
  return *std::find_if(
      choice.alternatives.begin(),
      choice.alternatives.end(),
      [](const Candidate& candidate) { return candidate.chosen; });
}

double largest(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

// Costs of one stage of a rank whose whole share is known.
Costs part(Costs costs, int64_t chunks) {
  const double parts = static_cast<double>(chunks);
  StageCosts& of = costs.stages[0];
  of.forward /= parts;
  of.input /= parts;
  of.weight /= parts;
  of.activation_bytes /= parts;
  return costs;
}

TEST(PlannerAuto, IsNeverWorseThanANamedKindThatFits) {
  for (const auto& triple :
       {stage(1, 1, 1, 8), stage(1, 2, 1, 8), stage(3, 4, 2, 8)}) {
    for (const int64_t p : {1, 2, 3, 4}) {
      for (const int64_t m : {1, 3, 8, 16}) {
        for (const double limit : {0.0, 8.0, 24.0, 40.0}) {
          PlanOptions options = automatic(p, m, {triple});
          options.link_cost = 0.25;
          options.costs->stages[0].boundary_bytes = 0.5;
          if (limit > 0) {
            options.memory_limit = {limit + 4};
          }
          const Choice choice = search(options);
          const Simulation found = simulate(choice.schedule, choice.costs);
          EXPECT_TRUE(verify(choice.schedule).valid());
          EXPECT_EQ(found.makespan, chosen(choice).makespan);
          EXPECT_EQ(largest(found.peak_bytes), chosen(choice).peak_bytes);
          EXPECT_EQ(plan(options), choice.schedule);
          for (const std::string& kind : kinds()) {
            if (kind == "auto" || kind == "forward" ||
                (kind == "none" && p > 1) ||
                (kind == "dualpipe_v" && m < 2 * p)) {
              continue;
            }
            PlanOptions named{.kind = kind, .ranks = p, .microbatches = m};
            named.link_cost = options.link_cost;
            const Schedule other = plan(named);
            Costs costs = part(*options.costs, other.stages / other.ranks);
            costs.latency = {options.link_cost};
            const Simulation run = simulate(other, costs);
            if (limit == 0 || largest(run.peak_bytes) <= limit + 4) {
              EXPECT_LE(found.makespan, run.makespan * (1 + 1e-9))
                  << kind << " p=" << p << " m=" << m << " limit=" << limit;
            }
          }
        }
      }
    }
  }
}

TEST(PlannerAuto, FindsBetterThanAnyNamedKindForUnequalStages) {
  const Choice choice = search(automatic(
      4,
      12,
      {stage(1, 1, 1, 1),
       stage(2, 2, 1, 1),
       stage(1, 3, 2, 1),
       stage(1, 1, 1, 1),
       stage(1, 1, 2, 1),
       stage(2, 1, 1, 1),
       stage(1, 2, 1, 1),
       stage(3, 1, 1, 1)}));
  double named = 1e9;
  for (const Candidate& candidate : choice.alternatives) {
    if (candidate.refused.empty() && candidate.plan.rfind("list", 0) != 0) {
      named = std::min(named, candidate.makespan);
    }
  }
  EXPECT_LT(chosen(choice).makespan, named);
  EXPECT_EQ(choice.schedule.kind, "auto");
  EXPECT_EQ(Schedule::parse(choice.schedule.text()), choice.schedule);
}

TEST(PlannerAuto, UsesTheRoomBetweenTwoKinds) {
  // v_half needs 5, zbv 8.
  const Choice choice = search(automatic(8, 32, {stage(1, 1, 1, 1)}, {6}));
  double half = 0;
  for (const Candidate& candidate : choice.alternatives) {
    if (candidate.plan == "v_half") {
      half = candidate.makespan;
    }
  }
  EXPECT_GT(half, 0);
  EXPECT_GT(chosen(choice).peak_bytes, 5);
  EXPECT_LT(chosen(choice).makespan, half - 1);
}

TEST(PlannerAuto, TiesGoToLessMemory) {
  // On one rank everything takes equally long.
  const Choice choice = search(automatic(1, 6, {stage(1, 1, 1, 1)}));
  EXPECT_EQ(chosen(choice).makespan, 18);
  EXPECT_EQ(chosen(choice).peak_bytes, 1);
  EXPECT_EQ(choice.schedule.kind, "none");
}

TEST(PlannerAuto, GivesTheSameAnswerTwice) {
  const PlanOptions options = automatic(3, 7, {stage(1, 1.5, 0.75, 1)}, {2.5});
  const Choice first = search(options);
  const Choice second = search(options);
  EXPECT_EQ(first.schedule, second.schedule);
  ASSERT_EQ(first.alternatives.size(), second.alternatives.size());
  std::set<std::string> names;
  for (size_t i = 0; i < first.alternatives.size(); ++i) {
    EXPECT_EQ(first.alternatives[i].plan, second.alternatives[i].plan);
    EXPECT_EQ(first.alternatives[i].makespan, second.alternatives[i].makespan);
    EXPECT_TRUE(names.insert(first.alternatives[i].plan).second)
        << first.alternatives[i].plan;
  }
}

TEST(PlannerAuto, SaysWhyOthersWereRefused) {
  const Choice choice = search(automatic(4, 6, {stage(1, 1, 1, 10)}, {35}));
  const auto why = [&](const std::string& plan) -> std::string {
    for (const Candidate& candidate : choice.alternatives) {
      if (candidate.plan == plan) {
        return candidate.refused;
      }
    }
    return "not tried";
  };
  EXPECT_EQ(why("gpipe"), "rank 0 needs 60 bytes, its limit is 35");
  EXPECT_EQ(why("1f1b warmup=1"), "rank 0 needs 40 bytes, its limit is 35");
  EXPECT_EQ(why("1f1b warmup=1 lowered"), "");
  EXPECT_EQ(why("v_half"), "");
  EXPECT_EQ(why("dualpipe_v"), "needs 8 microbatches");
  EXPECT_LE(chosen(choice).peak_bytes, 35);
}

TEST(PlannerAuto, KeepsALimitPerRank) {
  const std::vector<double> limits{30, 20, 25};
  const Choice choice = search(automatic(3, 9, {stage(1, 1, 1, 10)}, limits));
  const Simulation run = simulate(choice.schedule, choice.costs);
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_LE(run.peak_bytes[rank], limits[rank]);
  }
}

TEST(PlannerAuto, NamesTheSmallestLimitIfNothingFits) {
  for (const int64_t p : {1, 2, 4}) {
    StageCosts costs = stage(1, 2, 1, 10);
    costs.boundary_bytes = 3;
    costs.transient_bytes = 5;
    costs.static_bytes = 7;
    PlanOptions options = automatic(p, 6, {costs}, {1});
    std::string refused;
    try {
      search(options);
      FAIL();
    } catch (const ScheduleError& error) {
      refused = error.what();
    }
    const std::string start = "plan: expected a memory limit of at least ";
    ASSERT_EQ(refused.rfind(start, 0), 0u) << refused;
    EXPECT_NE(
        refused.find("but got 1 (argument 'memory_limit')"), std::string::npos);
    const double least = std::stod(refused.substr(start.size()));
    options.memory_limit = {least};
    EXPECT_EQ(chosen(search(options)).peak_bytes, least);
    options.memory_limit = {least - 0.5};
    EXPECT_THROW(search(options), ScheduleError);
  }
  EXPECT_THROW(
      plan(automatic(2, 6, {stage(1, 1, 1, 10)}, {100, 5})), ScheduleError);
}

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
