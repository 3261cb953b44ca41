// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Runs a schedule over the ranks of a process group, in pure C++.
///
/// \code
/// using namespace torch_sm3::pipeline;
/// RunnerOptions options;
/// options.loss = [](const c10::IValue& output, const c10::IValue& target) {
///   return torch::mse_loss(output.toTensor(), target.toTensor());
/// };
/// PipelineRunner runner(
///     plan({"1f1b", 2, 8}), group, {Stage(group->getRank(), module)},
///     options);
/// StepResult result = runner.step({inputs}, targets);
/// optimizer.step();
/// \endcode

#include <torch_sm3/export.h>
#include <torch_sm3/pipeline/schedule.h>
#include <torch_sm3/pipeline/transport.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class AnyModule;
}
namespace torch::jit {
struct Module;
}

namespace torch_sm3::pipeline {

/// One part of a model and its place in the pipeline.
///
/// The first stage is called with the inputs of the step, every other with the
/// value of the stage before: the items of a tuple or list are an argument
/// each.
class TORCH_SM3_API Stage {
 public:
  /// Arguments by position, then those by name (of the routes to the stage).
  using Keywords = std::map<std::string, c10::IValue>;
  using Body = std::function<c10::IValue(std::vector<c10::IValue>)>;

  /// \param index      number of the stage, from 0
  /// \param body       any function; what a route brings comes after the other
  ///                   arguments, in the order of its names
  /// \param parameters weights whose gradients a failed step drops
  Stage(int64_t index, Body body, std::vector<at::Tensor> parameters = {});

  /// \param index  number of the stage, from 0
  /// \param module a scripted module; it takes what a route brings by name
  Stage(int64_t index, const torch::jit::Module& module);

  /// \param index  number of the stage, from 0
  /// \param module takes at most eight tensors, integers, floats or booleans
  /// and
  ///               returns a tensor, or a pair, triple or vector of tensors;
  ///               what a route brings comes after the other arguments
  Stage(int64_t index, const torch::nn::AnyModule& module);

  /// Sends the item `name` of the stage's dict output to a later stage, as its
  /// argument of that name, and not with the others to the next stage.
  ///
  /// \param name   key of the dict
  /// \param target a later stage
  Stage& route(std::string name, int64_t target);

  int64_t index() const {
    return index_;
  }
  const std::map<std::string, int64_t>& routes() const {
    return routes_;
  }
  const std::vector<at::Tensor>& parameters() const {
    return parameters_;
  }
  c10::IValue operator()(
      std::vector<c10::IValue> arguments,
      const Keywords& keywords) const {
    return call_(std::move(arguments), keywords);
  }

 private:
  using Call =
      std::function<c10::IValue(std::vector<c10::IValue>, const Keywords&)>;

  int64_t index_;
  Call call_;
  std::vector<at::Tensor> parameters_;
  std::map<std::string, int64_t> routes_;
};

/// How the losses of the microbatches make the loss of the step.
enum class LossReduction {
  kMean,    ///< each microbatch counts 1/m
  kSamples, ///< each sample counts alike: the mean over the whole batch
  kSum,
};

/// Settings of a PipelineRunner; equal on all ranks but for `loss`.
struct RunnerOptions {
  /// Loss of the last stage, a scalar: of its output and of the target. Only
  /// the rank of the last stage needs it.
  std::function<at::Tensor(const c10::IValue&, const c10::IValue&)> loss;
  LossReduction loss_reduction = LossReduction::kMean;
  /// Dimension along which batches are cut.
  int64_t batch_dim = 0;
  /// Longest wait for one message, in seconds; independent of the group's.
  double timeout = 60.0;
  /// Sends of one channel to one peer that may be under way at once.
  int64_t max_pending = 2;
  /// See TransportOptions.
  std::map<std::pair<int64_t, int64_t>, double> link_delay;
};

/// What a step or an eval gave.
struct StepResult {
  /// After the reduction, of equal bits on every rank; undefined without a
  /// loss.
  at::Tensor loss;
  /// Of each microbatch, on every rank; undefined without a loss.
  at::Tensor losses;
  /// The last stage's output for each microbatch, detached, on its rank and if
  /// asked for; otherwise empty.
  std::vector<c10::IValue> outputs;
};

/// Says on every rank, in equal words, which rank failed in a step, where and
/// how.
class TORCH_SM3_API PipelineError : public std::runtime_error {
 public:
  /// \param text    what the user reads
  /// \param failure the failure that all ranks report
  PipelineError(const std::string& text, Failure failure);
  ~PipelineError() override;

  /// Rank, stage, microbatch, action, type and message.
  const Failure& failure() const {
    return failure_;
  }

 private:
  Failure failure_;
};

/// Another message came than the one that was due.
class TORCH_SM3_API ProtocolError : public PipelineError {
 public:
  using PipelineError::PipelineError;
};

/// Runs a schedule over the ranks of a process group.
///
/// Making a runner is collective: every rank passes the stages that it owns,
/// and all compare schedule and options. Gradients are those of the step's
/// loss, added up in microbatch order, with the bits of one process that runs
/// the same microbatches in turn.
class TORCH_SM3_API PipelineRunner {
 public:
  /// \param schedule what every rank does; messages are added if it has none
  /// \param group    the ranks, over Gloo, in the order of the schedule; used
  /// by
  ///                 nothing else while the runner lives; null for one rank
  /// \param stages   the stages of this rank
  /// \param options  settings
  /// \throws c10::ValueError the same on all ranks, if anything does not fit
  PipelineRunner(
      const Schedule& schedule,
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      std::vector<Stage> stages,
      RunnerOptions options = {});
  /// Closes.
  ~PipelineRunner();
  PipelineRunner(const PipelineRunner&) = delete;
  PipelineRunner& operator=(const PipelineRunner&) = delete;

  /// Runs forward and backward of one batch; gradients are added up.
  ///
  /// \param inputs         arguments of the first stage, whole batches that are
  ///                       cut along `batch_dim`; other ranks' are ignored
  /// \param target         second argument of the loss, cut in the same way
  /// \param return_outputs keep the last stage's outputs
  /// \throws PipelineError on every rank and with equal fields if any of them
  ///     fails; then the gradients of all stages' parameters are undefined
  StepResult step(
      const std::vector<c10::IValue>& inputs,
      const c10::IValue& target,
      bool return_outputs = false);

  /// Runs the forwards of one batch without gradients.
  ///
  /// \param inputs         as for `step`
  /// \param target         as for `step`; without it there is no loss
  /// \param return_outputs keep the last stage's outputs
  /// \throws PipelineError on every rank and with equal fields if any of them
  ///     fails
  StepResult eval(
      const std::vector<c10::IValue>& inputs,
      const c10::IValue& target = {},
      bool return_outputs = false);

  /// Ends the links and lets the group go. Idempotent.
  void close();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace torch_sm3::pipeline
