// SPDX-License-Identifier: Apache-2.0
// Failures of the C++ runner: the same error on all ranks, and clean links.
#include "pipeline_ranks.h"

#ifndef TORCH_SM3_TEST_GLOO

#include <gtest/gtest.h>

TEST(PipelineFaults, NeedsTheHeadersOfGloo) {
  GTEST_SKIP() << "no gloo/context.h; type: apt-get install libgloo-dev";
}

#else

#include "pipeline_models.h"

#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/runtime.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {
namespace {

using distributed::Group;

constexpr int64_t kMicrobatches = 3;

// Throws at a microbatch, in the forward or in the backward that belongs to it.
struct Trap {
  bool backward = false;
  int64_t microbatch = 0;
  int64_t calls = 0;

  void operator()(int64_t /*stage*/, const at::Tensor& output) {
    if (calls++ != microbatch) {
      return;
    }
    if (!backward) {
      throw std::domain_error("boom");
    }
    output.register_hook(
        [](const at::Tensor&) { throw std::domain_error("boom"); });
  }
};

std::string text_of(const Failure& failure) {
  return structure_of(failure);
}

// One failed step, then one that must be as if nothing had been.
void raise_at(int rank, const Group& group, int origin, Trap trap) {
  const Schedule schedule = plan({"1f1b", group->getSize(), kMicrobatches});
  const Pair batch = make_batch(6);
  Model model(schedule.stages);
  PipelineRunner runner(
      schedule, group, model.stages_of(schedule, rank), options());
  if (rank == origin) {
    model.watch = trap;
  }
  const Failure expected{
      origin,
      origin,
      trap.microbatch,
      c10::str(origin, trap.backward ? "B" : "F", trap.microbatch),
      "std::domain_error",
      "boom"};
  try {
    runner.step({batch.first}, batch.second);
    ADD_FAILURE() << "no error on rank " << rank;
  } catch (const PipelineError& error) {
    EXPECT_EQ(text_of(error.failure()), text_of(expected));
  }
  EXPECT_FALSE(model.has_gradients());
  model.watch = nullptr;
  Model whole(schedule.stages);
  const at::Tensor loss = whole.train(batch, kMicrobatches);
  EXPECT_TRUE(at::equal(runner.step({batch.first}, batch.second).loss, loss));
  EXPECT_TRUE(model.same_gradients(whole, rank));
}

TEST(PipelineFaults, ARaiseAtEveryActionReachesAllRanks) {
  for (const int ranks : {1, 2, 3}) {
    for (int origin = 0; origin < ranks; ++origin) {
      for (const bool backward : {false, true}) {
        for (int64_t i = 0; i < kMicrobatches; ++i) {
          distributed::expect_no_errors(
              on_ranks(ranks, [&](int rank, const Group& group) {
                raise_at(rank, group, origin, {backward, i});
              }));
        }
      }
    }
  }
}

TEST(PipelineFaults, TheLossIsPartOfTheLastForward) {
  distributed::expect_no_errors(on_ranks(2, [&](int rank, const Group& group) {
    const Schedule schedule = plan({"1f1b", 2, kMicrobatches});
    const Pair batch = make_batch(6);
    Model model(2);
    RunnerOptions wrong = options();
    wrong.loss = [](const c10::IValue& output, const c10::IValue&) {
      return output.toTensor();
    };
    PipelineRunner runner(
        schedule, group, model.stages_of(schedule, rank), wrong);
    try {
      runner.step({batch.first}, batch.second);
      ADD_FAILURE();
    } catch (const PipelineError& error) {
      EXPECT_EQ(error.failure().action, "1F0");
      const std::string text = error.what();
      EXPECT_NE(text.find("a scalar tensor, but got shape [2, 6]"), text.npos)
          << text;
    }
  }));
}

// Wrong arguments of one rank are the same error on all ranks.
void expect_wrong(
    const std::string& part,
    const std::function<void(int rank, const Group& group)>& work) {
  for (const std::string& error : on_ranks(2, work)) {
    EXPECT_NE(error.find(part), std::string::npos) << error;
  }
}

TEST(PipelineFaults, WrongArgumentsOfAStepAreTheSameErrorOnAllRanks) {
  const auto runner_of = [](int rank, const Group& group, Model& model) {
    const Schedule schedule = plan({"1f1b", 2, kMicrobatches});
    return std::make_unique<PipelineRunner>(
        schedule, group, model.stages_of(schedule, rank), options());
  };
  const Pair batch = make_batch(6);
  expect_wrong("at least 3 samples", [&](int rank, const Group& group) {
    Model model(2);
    runner_of(rank, group, model)
        ->step({batch.first.narrow(0, 0, 2)}, batch.second);
  });
  expect_wrong("expected a target", [&](int rank, const Group& group) {
    Model model(2);
    runner_of(rank, group, model)->step({batch.first}, {});
  });
  expect_wrong(
      "expected gradients to be on", [&](int rank, const Group& group) {
        Model model(2);
        const auto runner = runner_of(rank, group, model);
        const at::AutoGradMode mode(rank != 0);
        runner->step({batch.first}, batch.second);
      });
}

TEST(PipelineFaults, RanksThatDoNotFitAreNamed) {
  const auto make = [](const Group& group,
                       const Schedule& schedule,
                       std::vector<Stage> stages,
                       const RunnerOptions& chosen = options()) {
    PipelineRunner(schedule, group, std::move(stages), chosen);
  };
  const Model model(2);
  const Schedule schedule = plan({"1f1b", 2, kMicrobatches});
  const auto own = [&](int rank) { return model.stages_of(schedule, rank); };
  expect_wrong("the stages 1, each once", [&](int rank, const Group& group) {
    make(group, schedule, own(0));
    (void)rank;
  });
  expect_wrong(
      "a schedule of 2 ranks, but got 3", [&](int, const Group& group) {
        make(group, plan({"1f1b", 3, 3}), own(0));
      });
  expect_wrong(
      "expected 1f1b of 2 ranks and 3 microbatches (",
      [&](int rank, const Group& group) {
        make(group, plan({"1f1b", 2, 3 + rank}), own(rank));
      });
  expect_wrong(
      "expected 1 as on rank 0, but got 2 on rank 1 (argument 'max_pending')",
      [&](int rank, const Group& group) {
        RunnerOptions chosen = options();
        chosen.max_pending = 1 + rank;
        make(group, schedule, own(rank), chosen);
      });
  // Also where one rank alone is told something of no use.
  const auto refused = [&](const std::string& text,
                           const std::function<void(RunnerOptions*)>& change) {
    expect_wrong(text, [&](int rank, const Group& group) {
      RunnerOptions chosen = options();
      if (rank == 1) {
        change(&chosen);
      }
      make(group, schedule, own(rank), chosen);
    });
  };
  for (const double timeout : {0.0, -1.0, 1e300, HUGE_VAL}) {
    refused(
        "a timeout above 0 s and at most",
        [timeout](RunnerOptions* chosen) { chosen->timeout = timeout; });
  }
  refused("max_pending of at least 1, but got 0", [](RunnerOptions* chosen) {
    chosen->max_pending = 0;
  });
  refused("link_delay of seconds for pairs", [](RunnerOptions* chosen) {
    chosen->link_delay[{0, 1}] = HUGE_VAL;
  });
  expect_wrong("expected a loss", [&](int rank, const Group& group) {
    make(group, schedule, own(rank), {});
  });
}

TEST(PipelineFaults, AClosedRunnerSaysSo) {
  Model model(1);
  const Schedule schedule = plan({"none", 1, 2});
  PipelineRunner runner(
      schedule, nullptr, model.stages_of(schedule, 0), options());
  runner.close();
  runner.close();
  const Pair batch = make_batch(4);
  EXPECT_THROW(runner.step({batch.first}, batch.second), c10::Error);
  EXPECT_THROW(Stage(-1, Stage::Body()), c10::ValueError);
  EXPECT_THROW(Stage(1, Stage::Body()).route("x", 1), c10::ValueError);
}

// A rank whose group ends: the others raise at once, naming it.
TEST(PipelineFaults, ALostRankIsNamed) {
  distributed::expect_no_errors(on_ranks(3, [&](int rank, const Group& group) {
    const Schedule schedule = plan({"1f1b", 3, kMicrobatches});
    const Pair batch = make_batch(6);
    Model model(3);
    RunnerOptions patient = options();
    patient.timeout = 100.0;
    auto runner = std::make_unique<PipelineRunner>(
        schedule, group, model.stages_of(schedule, rank), patient);
    runner->step({batch.first}, batch.second);
    if (rank == 1) {
      runner->close();
      return;
    }
    for (int again = 0; again < 2; ++again) {
      try {
        runner->step({batch.first}, batch.second);
        ADD_FAILURE() << "no error on rank " << rank;
      } catch (const PipelineError& error) {
        EXPECT_EQ(error.failure().rank, 1);
        EXPECT_EQ(error.failure().error_type, "PeerLost");
      }
    }
  }));
}

} // namespace
} // namespace torch_sm3::pipeline

#endif
