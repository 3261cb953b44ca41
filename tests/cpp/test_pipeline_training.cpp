// SPDX-License-Identifier: Apache-2.0
// What a C++ runner does to gradients besides adding them up: tokens, tied
// weights, replicas, the optimizer's step; pairs and interrupts.
#include "pipeline_grid.h"

#ifndef TORCH_SM3_TEST_GLOO

#include <gtest/gtest.h>

TEST(PipelineTraining, NeedsTheHeadersOfGloo) {
  GTEST_SKIP() << "no gloo/context.h; type: apt-get install libgloo-dev";
}

#else

#include "pipeline_models.h"

#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/runtime.h>

#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <atomic>
#include <limits>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace torch_sm3::pipeline {
namespace {

using distributed::Group;

constexpr int64_t kParts = 4;

c10::IValue layer(const at::Tensor& weight, const c10::IValue& x) {
  return at::tanh(at::matmul(x.toTensor(), weight));
}

// Stages of one layer each.
std::vector<Stage> layers(
    const Schedule& schedule,
    int rank,
    const std::vector<at::Tensor>& weights) {
  std::vector<Stage> own;
  for (uint32_t stage = 0; stage < schedule.stages; ++stage) {
    if (schedule.placement[stage] == static_cast<uint32_t>(rank)) {
      const at::Tensor& weight = weights[stage];
      own.emplace_back(
          stage,
          [weight](const std::vector<c10::IValue>& x) {
            return layer(weight, x.at(0));
          },
          std::vector<at::Tensor>{weight});
    }
  }
  return own;
}

// The same layers, one after the other.
at::Tensor run_all(const std::vector<at::Tensor>& weights, at::Tensor x) {
  for (const at::Tensor& weight : weights) {
    x = layer(weight, x).toTensor();
  }
  return x;
}

// Sum of squares over those samples that count.
at::Tensor
squares(const at::Tensor& output, const at::Tensor& target, int64_t count) {
  return at::sum(at::pow(output - target, 2).narrow(0, 0, count));
}

TEST(PipelineTraining, EachTokenCountsAlike) {
  for (const std::vector<int64_t>& counts :
       {std::vector<int64_t>{3, 0, 7, 1}, std::vector<int64_t>(kParts, 0)}) {
    const Pair batch = make_batch(8 * kParts);
    const auto total =
        std::accumulate(counts.begin(), counts.end(), int64_t{0});
    const auto expected = weights(2);
    at::Tensor sum = at::zeros({});
    for (int64_t i = 0; i < kParts; ++i) {
      sum = sum + squares(
                      run_all(expected, batch.first.narrow(0, 8 * i, 8)),
                      batch.second.narrow(0, 8 * i, 8),
                      counts[i]);
    }
    const at::Tensor mean =
        sum / static_cast<double>(std::max<int64_t>(total, 1));
    mean.backward();
    for (const int ranks : {1, 2}) {
      distributed::expect_no_errors(
          on_ranks(ranks, [&](int rank, const Group& group) {
            const Schedule schedule =
                ranks == 1 ? all_forwards_first({0, 0}, kParts, true)
                           : plan({"zb_h1", 2, kParts});
            RunnerOptions chosen = options();
            chosen.loss_reduction = LossReduction::kTokens;
            chosen.loss = [&counts, call = 0](
                              const c10::IValue& output,
                              const c10::IValue& target) mutable {
              const int64_t count = counts[call++ % kParts];
              c10::impl::GenericDict metrics(
                  c10::StringType::get(), c10::AnyType::get());
              metrics.insert("count", count);
              return c10::ivalue::Tuple::create(
                  {squares(output.toTensor(), target.toTensor(), count),
                   count,
                   metrics});
            };
            const auto own = weights(2);
            const at::Tensor before = at::ones_like(own[0]);
            own[0].mutable_grad() = before.clone();
            PipelineRunner runner(
                schedule, group, layers(schedule, rank, own), chosen);
            const StepResult result = runner.step({batch.first}, batch.second);
            EXPECT_TRUE(at::allclose(result.loss, mean.detach()));
            EXPECT_EQ(result.tokens, total);
            ASSERT_EQ(result.metrics.size(), static_cast<size_t>(kParts));
            EXPECT_EQ(
                result.metrics[2].toGenericDict().at("count").toInt(),
                counts[2]);
            if (rank == 0) {
              // What was there before is not divided.
              EXPECT_TRUE(
                  at::allclose(own[0].grad(), expected[0].grad() + before));
            }
            if (rank == ranks - 1) {
              EXPECT_TRUE(at::allclose(own[1].grad(), expected[1].grad()));
            }
            EXPECT_THROW(result.loss.backward(), c10::Error);
          }));
    }
  }
}

TEST(PipelineTraining, ALossOfAnotherFormIsNamed) {
  for (const std::string& error :
       on_ranks(2, [&](int rank, const Group& group) {
         const Schedule schedule = plan({"1f1b", 2, 2});
         RunnerOptions chosen = options();
         chosen.loss_reduction = LossReduction::kTokens;
         PipelineRunner runner(
             schedule, group, layers(schedule, rank, weights(2)), chosen);
         const Pair batch = make_batch(4);
         runner.step({batch.first}, batch.second);
       })) {
    EXPECT_NE(error.find("rank 1 at 1F0: c10::TypeError"), std::string::npos);
    EXPECT_NE(error.find("(sum, count) or (sum, count, metrics)"), -1u)
        << error;
  }
}

// The first and the last of three stages hold one weight.
TEST(PipelineTraining, TiedWeightsStayOne) {
  const Pair batch = make_batch(3 * kParts);
  auto expected = weights(2);
  expected.push_back(expected[0]);
  for (int64_t i = 0; i < kParts; ++i) {
    const at::Tensor loss = loss_of(
        run_all(expected, batch.first.narrow(0, 3 * i, 3)),
        batch.second.narrow(0, 3 * i, 3));
    (loss / kParts).backward();
  }
  for (const auto& placement : std::vector<std::vector<uint32_t> >{
           {0, 1, 2}, {0, 1, 0}, {0, 1, 1}, {0, 0, 0}}) {
    const int ranks = static_cast<int>(
        *std::max_element(placement.begin(), placement.end()) + 1);
    distributed::expect_no_errors(
        on_ranks(ranks, [&](int rank, const Group& group) {
          Schedule schedule = all_forwards_first(placement, kParts, false);
          // Compute only, so that the stages' tie finds its place.
          for (auto& row : schedule.rows) {
            std::erase_if(
                row, [](Action action) { return !is_compute(action.op); });
          }
          const auto own = weights(3); // unlike each other before
          std::vector<Stage> stages = layers(schedule, rank, own);
          for (Stage& stage : stages) {
            if (stage.index() != 1) {
              stage.tie("embedding", own[stage.index()]);
            }
          }
          PipelineRunner runner(schedule, group, stages, options());
          runner.step({batch.first}, batch.second);
          for (const Stage& stage : stages) {
            const at::Tensor& weight = own[stage.index()];
            EXPECT_TRUE(at::equal(weight, expected[stage.index()]));
            EXPECT_TRUE(
                at::allclose(weight.grad(), expected[stage.index()].grad()));
          }
          torch::optim::SGD optimizer(
              std::vector<at::Tensor>(own), torch::optim::SGDOptions(0.1));
          const OptimResult result = runner.optimizer_step(optimizer, 1e9);
          const double norm = at::sqrt(
                                  at::sum(at::pow(expected[0].grad(), 2)) +
                                  at::sum(at::pow(expected[1].grad(), 2)))
                                  .item<double>();
          EXPECT_NEAR(*result.grad_norm, norm, 1e-5 * norm);
        }));
  }
}

TEST(PipelineTraining, TiedWeightsOfTwoShapesAreRefused) {
  for (const std::string& error :
       on_ranks(2, [&](int rank, const Group& group) {
         const Schedule schedule = plan({"1f1b", 2, 2});
         const at::Tensor weight =
             at::zeros({kWidth, kWidth + rank}).requires_grad_();
         Stage stage(rank, Stage::Body(), {weight});
         stage.tie("embedding", weight);
         PipelineRunner(schedule, group, {stage}, options());
       })) {
    EXPECT_NE(
        error.find("expected tied weight 'embedding' of shape [6, 6]"),
        std::string::npos)
        << error;
  }
}

// Adds one to the sum, so that it cannot be taken for a reduction of ours.
class SumPlusOne : public c10d::CommHookInterface {
 public:
  explicit SumPlusOne(Group group) : group_(std::move(group)) {}

  c10::intrusive_ptr<c10::ivalue::Future>
  runHook(c10d::GradBucket& bucket) override {
    ++calls;
    last = bucket.isLast();
    std::vector<at::Tensor> one{bucket.getBufferRef()};
    return group_->allreduce(one)->getFuture();
  }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    return result.toListRef()[0].toTensor() + 1;
  }

  int calls = 0;
  bool last = false;

 private:
  Group group_;
};

TEST(PipelineTraining, ReplicasAreReducedOncePerStep) {
  const Pair batch = make_batch(8 * kParts);
  const auto half = [&](int replica) {
    return Pair{
        batch.first.narrow(0, 4 * kParts * replica, 4 * kParts),
        batch.second.narrow(0, 4 * kParts * replica, 4 * kParts)};
  };
  std::vector<Model> alone{Model(2), Model(2)};
  alone[0].train(half(0), kParts);
  alone[1].train(half(1), kParts);
  for (const int kind : {0, 1, 2, 3, 4}) {
    distributed::expect_no_errors(on_grid(2, 2, [&](const Place& place) {
      const Schedule schedule = plan({"1f1b", 2, kParts});
      RunnerOptions chosen = options();
      chosen.data_parallel = place.replicas;
      chosen.reduce = static_cast<Reduce>(kind % 4);
      const auto hook = std::make_shared<SumPlusOne>(place.replicas);
      chosen.hook = kind == 4 ? hook : nullptr;
      const Model model(2);
      const auto stages = model.stages_of(schedule, place.rank);
      PipelineRunner runner(schedule, place.pipeline, stages, chosen);
      const Pair mine = half(place.replica);
      runner.step({mine.first}, mine.second);
      const at::Tensor got = stages[0].parameters()[0].grad();
      const at::Tensor a = alone[0].gradient(place.rank);
      const at::Tensor b = alone[1].gradient(place.rank);
      if (kind == 2) {
        EXPECT_FALSE(at::equal(got, a) || at::equal(got, b));
        return;
      }
      const at::Tensor expected = kind == 0            ? (a + b) / 2
                                  : kind == 1          ? a + b
                                  : kind == 4          ? a + b + 1
                                  : place.replica == 0 ? a
                                                       : b;
      EXPECT_TRUE(at::allclose(got, expected)) << kind;
      if (kind == 4) {
        EXPECT_EQ(hook->calls, 1);
        EXPECT_TRUE(hook->last);
      }
    }));
  }
}

// A failure of one replica is one of all, and nobody waits in a reduction.
TEST(PipelineTraining, AFailureReachesAllReplicas) {
  const Pair batch = make_batch(2 * kParts);
  distributed::expect_no_errors(on_grid(2, 2, [&](const Place& place) {
    const Schedule schedule = plan({"1f1b", 2, kParts});
    RunnerOptions chosen = options();
    chosen.data_parallel = place.replicas;
    Model model(2);
    PipelineRunner runner(
        schedule,
        place.pipeline,
        model.stages_of(schedule, place.rank),
        chosen);
    if (place.rank == 1 && place.replica == 1) {
      model.watch = [](int64_t, const at::Tensor&) {
        throw std::domain_error("boom");
      };
    }
    try {
      runner.step({batch.first}, batch.second);
      ADD_FAILURE() << "no error on rank " << place.rank;
    } catch (const PipelineError& error) {
      EXPECT_EQ(error.failure().error_type, "std::domain_error");
      EXPECT_EQ(error.failure().action, "1F0");
      const std::string text = error.what();
      EXPECT_NE(text.find("(replica 1)"), std::string::npos) << text;
      EXPECT_EQ(text.find("also"), std::string::npos) << text;
    }
    EXPECT_FALSE(model.has_gradients());
    model.watch = nullptr;
    Model whole(2);
    whole.train(batch, kParts);
    runner.step({batch.first}, batch.second);
    EXPECT_TRUE(
        at::allclose(model.gradient(place.rank), whole.gradient(place.rank)));
  }));
}

// One replica ends: the ranks of the others name it, all alike.
TEST(PipelineTraining, ALostReplicaIsNamed) {
  for (const int replicas : {2, 3}) {
    const Pair batch = make_batch(2 * kParts);
    std::mutex mutex;
    std::set<std::string> texts;
    distributed::expect_no_errors(on_grid(2, replicas, [&](const Place& place) {
      const Schedule schedule = plan({"1f1b", 2, kParts});
      const Model model(2);
      RunnerOptions patient = options();
      patient.timeout = 100.0;
      patient.data_parallel = place.replicas;
      PipelineRunner runner(
          schedule,
          place.pipeline,
          model.stages_of(schedule, place.rank),
          patient);
      runner.step({batch.first}, batch.second);
      if (place.replica == 1) {
        return;
      }
      for (int again = 0; again < 2; ++again) {
        try {
          runner.step({batch.first}, batch.second);
          ADD_FAILURE() << "no error on rank " << place.rank;
        } catch (const PipelineError& error) {
          EXPECT_EQ(error.failure().error_type, "PeerLost") << error.what();
          const std::lock_guard<std::mutex> lock(mutex);
          texts.insert(error.failure().message);
        }
      }
    }));
    if (replicas == 2) {
      EXPECT_EQ(
          texts,
          std::set<std::string>{"the rank of replica 1 with the same stages "
                                "ended or left the pipeline"});
    }
    for (const std::string& text : texts) {
      EXPECT_NE(text.find(" 1"), std::string::npos) << text;
    }
  }
}

TEST(PipelineTraining, TheNormIsThatOfAllStages) {
  const Pair batch = make_batch(2 * kParts);
  Model whole(3);
  whole.train(batch, kParts);
  std::vector<at::Tensor> all = whole.parameters();
  const double norm = torch::nn::utils::clip_grad_norm_(all, 1e-3);
  torch::optim::SGD reference(all, torch::optim::SGDOptions(0.5));
  reference.step();
  distributed::expect_no_errors(on_ranks(3, [&](int rank, const Group& group) {
    const Schedule schedule = plan({"1f1b", 3, kParts});
    const Model model(3);
    const auto stages = model.stages_of(schedule, rank);
    PipelineRunner runner(schedule, group, stages, options());
    torch::optim::SGD optimizer(
        stages[0].parameters(), torch::optim::SGDOptions(0.5));
    runner.step({batch.first}, batch.second);
    const OptimResult result = runner.optimizer_step(optimizer, 1e-3);
    EXPECT_TRUE(result.applied);
    EXPECT_NEAR(*result.grad_norm, norm, 1e-6 * norm);
    const at::Tensor weight = stages[0].parameters()[0];
    EXPECT_TRUE(at::allclose(weight, all[rank], 1e-6, 1e-9));
    // One rank's infinity is a step that all leave out.
    const at::Tensor before = weight.detach().clone();
    if (rank == 1) {
      weight.mutable_grad().fill_(std::numeric_limits<float>::infinity());
    }
    EXPECT_FALSE(runner.optimizer_step(optimizer, 1e-3).applied);
    EXPECT_TRUE(at::equal(weight, before));
    runner.zero_grad();
    EXPECT_FALSE(weight.grad().defined());
    EXPECT_TRUE(runner.optimizer_step(optimizer).applied);
    // Only clips.
    runner.step({batch.first}, batch.second);
    const at::Tensor kept = weight.detach().clone();
    const double larger = *runner.clip_grad_norm(1e9).grad_norm;
    EXPECT_EQ(*runner.clip_grad_norm(larger / 2).grad_norm, larger);
    EXPECT_NEAR(
        *runner.clip_grad_norm(1e9).grad_norm, larger / 2, 1e-5 * larger);
    EXPECT_TRUE(at::equal(weight, kept));
    for (const auto& [first, others] :
         {std::pair<std::optional<double>, std::optional<double> >{-1.0, -1.0},
          {1.0, 2.0},
          {std::nullopt, 1.0},
          {1.0, std::nullopt}}) {
      EXPECT_THROW(
          runner.optimizer_step(optimizer, rank == 0 ? first : others),
          c10::ValueError);
    }
    EXPECT_TRUE(runner.optimizer_step(optimizer).applied);
  }));
}

TEST(PipelineTraining, AnOptimizerThatThrowsIsTheSameErrorOnAllRanks) {
  class Broken : public torch::optim::SGD {
   public:
    using SGD::SGD;
    at::Tensor step(LossClosure) override {
      throw std::domain_error("no step");
    }
  };
  for (const std::string& error :
       on_ranks(2, [&](int rank, const Group& group) {
         const Schedule schedule = plan({"1f1b", 2, 2});
         const auto own = weights(2);
         PipelineRunner runner(
             schedule, group, layers(schedule, rank, own), options());
         torch::optim::SGD good(own, torch::optim::SGDOptions(0.1));
         Broken broken(own, torch::optim::SGDOptions(0.1));
         rank == 1 ? runner.optimizer_step(broken)
                   : runner.optimizer_step(good);
       })) {
    EXPECT_NE(
        error.find("rank 1 at OPTIM: std::domain_error: no step"),
        std::string::npos)
        << error;
  }
}

// Both ranks run the backward of a pair inside the forward.
TEST(PipelineTraining, AStageMayRunPairsInOneCall) {
  const Schedule schedule = plan({"dualpipe_v", 2, kParts});
  const Pair batch = make_batch(2 * kParts);
  Model expected(4);
  const at::Tensor loss = expected.train(batch, kParts);
  std::atomic<int> pairs{0};
  distributed::expect_no_errors(on_ranks(2, [&](int rank, const Group& group) {
    const Model model(4);
    auto stages = model.stages_of(schedule, rank);
    for (Stage& stage : stages) {
      const int64_t index = stage.index();
      stage.overlap([&, index](
                        const std::vector<c10::IValue>& arguments,
                        const std::function<void()>& backward) {
        ++pairs;
        backward();
        return model.run(index, arguments);
      });
    }
    PipelineRunner runner(schedule, group, stages, options());
    EXPECT_TRUE(at::equal(runner.step({batch.first}, batch.second).loss, loss));
    for (const Stage& stage : stages) {
      EXPECT_TRUE(model.same_gradients(expected, stage.index()));
    }
  }));
  EXPECT_GT(pairs, 0);
}

TEST(PipelineTraining, MicrobatchesMayDifferInShape) {
  const Pair batch = make_batch(12);
  const std::vector<int64_t> sizes{6, 1, 5};
  const auto xs = batch.first.split_with_sizes(sizes);
  const auto ys = batch.second.split_with_sizes(sizes);
  const auto expected = weights(2);
  at::mse_loss(run_all(expected, batch.first), batch.second).backward();
  distributed::expect_no_errors(on_ranks(2, [&](int rank, const Group& group) {
    const Schedule schedule = plan({"1f1b", 2, 3});
    RunnerOptions chosen = options();
    chosen.loss_reduction = LossReduction::kSamples;
    const auto own = weights(2);
    PipelineRunner runner(schedule, group, layers(schedule, rank, own), chosen);
    const StepResult result = runner.step_microbatches(
        {{xs[0]}, {xs[1]}, {xs[2]}}, {ys[0], ys[1], ys[2]});
    EXPECT_EQ(result.losses.size(0), 3);
    EXPECT_TRUE(at::allclose(own[rank].grad(), expected[rank].grad()));
    // An eval has as many as it likes, and leaves no trace.
    const at::Tensor before = own[rank].grad().clone();
    const StepResult other =
        runner.eval_microbatches({{xs[0]}, {xs[2]}}, {ys[0], ys[2]}, true);
    EXPECT_EQ(other.losses.size(0), 2);
    EXPECT_EQ(other.outputs.size(), rank == 1 ? 2u : 0u);
    EXPECT_TRUE(at::equal(before, own[rank].grad()));
    EXPECT_THROW(runner.step_microbatches({{xs[0]}}, {ys[0]}), c10::ValueError);
    EXPECT_EQ(runner.steps(), 1u);
  }));
}

// An interrupt is a failure like any other: all ranks hear of it, and the next
// step is as if it had not been.
TEST(PipelineTraining, AnInterruptReachesAllRanks) {
  const Schedule schedule = plan({"1f1b", 2, 2});
  const Pair batch = make_batch(4);
  distributed::expect_no_errors(on_ranks(2, [&](int rank, const Group& group) {
    Model model(2);
    PipelineRunner runner(
        schedule, group, model.stages_of(schedule, rank), options());
    if (rank == 1) {
      model.watch = [](int64_t, const at::Tensor&) { interrupt(); };
    }
    try {
      runner.step({batch.first}, batch.second);
      ADD_FAILURE() << "no error on rank " << rank;
    } catch (const PipelineError& error) {
      EXPECT_EQ(error.failure().error_type, "KeyboardInterrupt");
    }
    EXPECT_FALSE(model.has_gradients());
    model.watch = nullptr;
    Model whole(2);
    whole.train(batch, 2);
    runner.step({batch.first}, batch.second);
    EXPECT_TRUE(model.same_gradients(whole, rank));
  }));
}

TEST(PipelineTraining, TwoRunnersDoNotShareAGroup) {
  distributed::expect_no_errors(on_ranks(2, [&](int rank, const Group& group) {
    const Schedule schedule = plan({"1f1b", 2, 2});
    const Model model(2);
    const auto stages = model.stages_of(schedule, rank);
    PipelineRunner runner(schedule, group, stages, options());
    EXPECT_THROW(
        PipelineRunner(schedule, group, stages, options()), c10::Error);
    runner.close();
  }));
}

TEST(PipelineTraining, AScheduleThatWouldHangIsRefused) {
  for (const std::string& error :
       on_ranks(2, [&](int rank, const Group& group) {
         Schedule schedule = plan({"1f1b", 2, 1}).lower();
         // The message that rank 1 waits for is sent last.
         auto& row = schedule.rows[0];
         const auto sent = std::find_if(row.begin(), row.end(), [](Action one) {
           return one.op == Op::kSendForward;
         });
         const Action message = *sent;
         row.erase(sent);
         row.push_back(message);
         const Model model(2);
         PipelineRunner(
             schedule, group, model.stages_of(schedule, rank), options());
       })) {
    EXPECT_NE(error.find("waits at"), std::string::npos) << error;
  }
}

// One process, so that no other thread draws from the same generator.
TEST(PipelineTraining, RandomNumbersDependOnStageAndMicrobatchOnly) {
  const Pair batch = make_batch(2 * kParts);
  const auto losses_of = [&](const Schedule& schedule, uint64_t seed) {
    const auto own = weights(2);
    std::vector<Stage> stages;
    for (int64_t index = 0; index < 2; ++index) {
      stages.emplace_back(
          index,
          [weight = own[index]](const std::vector<c10::IValue>& x) {
            return at::dropout(layer(weight, x.at(0)).toTensor(), 0.5, true);
          },
          std::vector<at::Tensor>{own[index]});
    }
    RunnerOptions chosen = options();
    chosen.deterministic = true;
    chosen.seed = seed;
    PipelineRunner runner(schedule, nullptr, stages, chosen);
    at::manual_seed(1);
    const at::Tensor drawn = at::rand({1});
    at::manual_seed(1);
    const at::Tensor first = runner.step({batch.first}, batch.second).losses;
    EXPECT_TRUE(at::equal(drawn, at::rand({1}))) << "the caller's numbers";
    return at::stack(
        {first.detach(),
         runner.step({batch.first}, batch.second).losses.detach()});
  };
  const Schedule breadth = all_forwards_first({0, 0}, kParts, false);
  Schedule depth = breadth;
  depth.rows[0].clear();
  for (uint32_t i = 0; i < kParts; ++i) {
    depth.rows[0].push_back({Op::kForward, 0, 0, i});
    depth.rows[0].push_back({Op::kForward, 0, 1, i});
    depth.rows[0].push_back({Op::kBackward, 0, 1, i});
    depth.rows[0].push_back({Op::kBackward, 0, 0, i});
  }
  const at::Tensor losses = losses_of(breadth, 3);
  EXPECT_TRUE(at::equal(losses, losses_of(depth, 3)));
  EXPECT_FALSE(at::equal(losses, losses_of(depth, 4)));
  EXPECT_FALSE(at::equal(losses[0], losses[1]));
}

} // namespace
} // namespace torch_sm3::pipeline

#endif
