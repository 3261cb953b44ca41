// SPDX-License-Identifier: Apache-2.0
// The C++ runner over Gloo, its ranks threads of this process, against one loop
// over the same microbatches.
#include "adasum_groups.h"

#ifndef TORCH_SM3_TEST_GLOO

#include <gtest/gtest.h>

TEST(PipelineRuntime, NeedsTheHeadersOfGloo) {
  GTEST_SKIP() << "no gloo/context.h; type: apt-get install libgloo-dev";
}

#else

#include "pipeline_models.h"
#include "pipeline_ranks.h"

#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/runtime.h>

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>

#include <mutex>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {
namespace {

using distributed::Group;

// Steps twice on every rank and compares losses and gradients with one loop.
void expect_bits_of_one_loop(const Schedule& schedule) {
  const auto stages = static_cast<int64_t>(schedule.stages);
  const auto m = static_cast<int64_t>(schedule.microbatches);
  Model expected(stages);
  const Pair batch = make_batch(2 * m + 1);
  std::vector<at::Tensor> losses;
  for (int step = 0; step < 2; ++step) {
    losses.push_back(expected.train(batch, m));
  }
  distributed::expect_no_errors(on_ranks(
      static_cast<int>(schedule.ranks), [&](int rank, const Group& group) {
        Model model(stages);
        PipelineRunner runner(
            schedule, group, model.stages_of(schedule, rank), options());
        for (int step = 0; step < 2; ++step) {
          const StepResult result = runner.step({batch.first}, batch.second);
          EXPECT_TRUE(at::equal(result.loss, losses[step]));
          EXPECT_EQ(result.losses.sizes(), (std::vector<int64_t>{m}));
        }
        for (uint32_t stage = 0; stage < schedule.stages; ++stage) {
          if (schedule.placement[stage] == static_cast<uint32_t>(rank)) {
            EXPECT_TRUE(model.same_gradients(expected, stage)) << stage;
          }
        }
      }));
}

TEST(PipelineRuntime, NamedPlansHaveTheBitsOfOneLoop) {
  for (const int64_t p : {1, 2, 3}) {
    for (const int64_t m : {1, 2, 5}) {
      expect_bits_of_one_loop(plan({"gpipe", p, m}));
      expect_bits_of_one_loop(plan({"1f1b", p, m}));
    }
  }
}

// Two chunks on each of two ranks: both neighbours are the same peer, or this
// rank itself; backwards whole and in two parts.
TEST(PipelineRuntime, EveryPlacementHasTheBitsOfOneLoop) {
  for (const bool split : {false, true}) {
    for (const auto& placement : std::vector<std::vector<uint32_t> >{
             {0, 1, 0, 1}, {0, 1, 1, 0}, {0, 0, 1, 1}, {0, 0, 0, 0}}) {
      expect_bits_of_one_loop(all_forwards_first(placement, 3, split));
    }
  }
}

TEST(PipelineRuntime, OneRankNeedsNoGroup) {
  Model expected(2);
  const Pair batch = make_batch(6);
  const at::Tensor loss = expected.train(batch, 3);
  Model model(2);
  const Schedule schedule = all_forwards_first({0, 0}, 3, false);
  PipelineRunner runner(
      schedule, nullptr, model.stages_of(schedule, 0), options());
  EXPECT_TRUE(at::equal(runner.step({batch.first}, batch.second).loss, loss));
  EXPECT_TRUE(model.same_gradients(expected, 1));
}

TEST(PipelineRuntime, EvalLeavesNoTrace) {
  const Pair batch = make_batch(6);
  Model expected(2);
  const at::Tensor loss = expected.train(batch, 3);
  distributed::expect_no_errors(on_ranks(2, [&](int rank, const Group& group) {
    const Schedule schedule = plan({"1f1b", 2, 3});
    Model model(2);
    PipelineRunner runner(
        schedule, group, model.stages_of(schedule, rank), options());
    const StepResult before = runner.eval({batch.first}, batch.second, true);
    EXPECT_TRUE(at::equal(before.loss, loss));
    EXPECT_EQ(before.outputs.size(), rank == 1 ? 3u : 0u);
    EXPECT_FALSE(runner.eval({batch.first}).loss.defined());
    EXPECT_FALSE(model.has_gradients());
    runner.step({batch.first}, batch.second);
    EXPECT_TRUE(model.same_gradients(expected, rank));
  }));
}

// torch gives the result of some losses a storage as large as what it is the
// mean of; no microbatch may leave it, nor its own output, behind.
TEST(PipelineRuntime, LossesKeepNothingOfTheirMicrobatch) {
  for (const LossReduction reduction :
       {LossReduction::kMean, LossReduction::kSamples, LossReduction::kSum}) {
    Model model(1);
    const Pair batch = make_batch(10);
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl> > seen;
    RunnerOptions chosen = options();
    chosen.loss_reduction = reduction;
    chosen.loss = [&seen](const auto& output, const auto& target) {
      for (const auto& before : seen) {
        EXPECT_TRUE(before.expired()) << seen.size() / 2;
      }
      // Both are made here, so that only the runner can hold them.
      const at::Tensor own = output.toTensor() * 1;
      const at::Tensor loss = loss_of(own, target);
      seen.push_back(own.storage().getWeakStorageImpl());
      seen.push_back(loss.storage().getWeakStorageImpl());
      return c10::IValue(loss);
    };
    const Schedule schedule = plan({"none", 1, 5});
    PipelineRunner runner(
        schedule, nullptr, model.stages_of(schedule, 0), chosen);
    const StepResult result = runner.step({batch.first}, batch.second);
    EXPECT_EQ(seen.size(), 10u);
    EXPECT_EQ(result.loss.storage().nbytes(), sizeof(float));
    EXPECT_EQ(result.losses.storage().nbytes(), 5 * sizeof(float));
  }
}

TEST(PipelineRuntime, ARouteSkipsAStage) {
  const Pair batch = make_batch(6);
  for (const std::vector<uint32_t>& placement :
       std::vector<std::vector<uint32_t> >{{0, 1, 2}, {0, 1, 0}, {0, 0, 0}}) {
    const int ranks = *std::max_element(placement.begin(), placement.end()) + 1;
    const Schedule schedule = all_forwards_first(placement, 3, false, {{0, 2}});
    RoutedModel expected;
    expected.train(batch, 3);
    distributed::expect_no_errors(
        on_ranks(ranks, [&](int rank, const Group& group) {
          RoutedModel model;
          PipelineRunner runner(
              schedule, group, model.stages_of(schedule, rank), options());
          runner.step({batch.first}, batch.second);
          EXPECT_TRUE(model.same_gradients(expected, schedule, rank));
        }));
  }
}

TEST(PipelineRuntime, ModulesOfBothKindsAreStages) {
  const Pair batch = make_batch(4);
  distributed::expect_no_errors(on_ranks(2, [&](int rank, const Group& group) {
    torch::nn::Linear linear(kWidth, kWidth);
    torch::jit::Module script = scripted_head();
    std::vector<Stage> stages;
    rank == 0 ? stages.emplace_back(0, torch::nn::AnyModule(linear))
              : stages.emplace_back(1, script);
    PipelineRunner runner(plan({"1f1b", 2, 2}), group, stages, options());
    const StepResult result = runner.step({batch.first}, batch.second);
    EXPECT_TRUE(result.loss.defined());
    EXPECT_EQ(linear->weight.grad().defined(), rank == 0);
    EXPECT_EQ(script.attr("weight").toTensor().grad().defined(), rank == 1);
  }));
}

} // namespace
} // namespace torch_sm3::pipeline

#endif
