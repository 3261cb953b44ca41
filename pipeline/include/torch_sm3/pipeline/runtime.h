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
/// runner.optimizer_step(optimizer, /*max_norm=*/1.0);
/// \endcode

#include <torch_sm3/export.h>
#include <torch_sm3/pipeline/schedule.h>
#include <torch_sm3/pipeline/stage.h>
#include <torch_sm3/pipeline/transport.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace torch::optim {
class Optimizer;
}
namespace c10d {
class CommHookInterface;
}

namespace torch_sm3::pipeline {

/// How the losses of the microbatches make the loss of the step.
enum class LossReduction {
  kMean,    ///< each microbatch counts 1/m
  kSamples, ///< each sample counts alike: the mean over the whole batch
  kSum,     ///< added up
  kTokens, ///< each token counts alike: the sum over all, divided once by their
           ///< number in all microbatches and replicas; 0 tokens give zeros
};

/// How gradients are combined over data-parallel replicas, once per step.
enum class Reduce {
  kMean,
  kSum,
  kAdasum,
  kNone,
};

/// Settings of a PipelineRunner; equal on all ranks but for functions and
/// groups.
struct RunnerOptions {
  /// Loss of the last stage, of its output and of the target: a scalar tensor,
  /// or for kTokens a tuple of the sum over the tokens, their number and, if it
  /// likes, a dict of metrics. Only the rank of the last stage needs it.
  std::function<c10::IValue(const c10::IValue&, const c10::IValue&)> loss;
  LossReduction loss_reduction = LossReduction::kMean;
  /// Dimension along which batches are cut.
  int64_t batch_dim = 0;
  /// Longest wait for one message, in seconds; independent of the group's.
  double timeout = 60.0;
  /// Sends of one channel to one peer that may be under way at once.
  int64_t max_pending = 2;
  /// See TransportOptions.
  std::map<std::pair<int64_t, int64_t>, double> link_delay;
  /// The ranks that hold the same stages of other replicas, over Gloo; used by
  /// nothing else while the runner lives; null for none.
  c10::intrusive_ptr<c10d::ProcessGroup> data_parallel;
  /// How gradients are combined over `data_parallel`.
  Reduce reduce = Reduce::kMean;
  /// Combines them instead, bucket by bucket of a stage, as in a c10d::Reducer.
  std::shared_ptr<c10d::CommHookInterface> hook;
  /// Whether the random numbers of a forward depend on `seed`, step, stage and
  /// microbatch only, whatever the schedule and the ranks.
  bool deterministic = false;
  /// See `deterministic`.
  uint64_t seed = 0;
  /// Whether all ranks learn the losses, not only that of the last stage.
  bool share_loss = true;
};

/// What a step or an eval gave.
struct StepResult {
  /// After the reduction, of equal bits on every rank; undefined without a
  /// loss. Its backward has run already; another one says so.
  at::Tensor loss;
  /// Of each microbatch, on every rank; undefined without a loss.
  at::Tensor losses;
  /// The last stage's output for each microbatch, detached, on its rank and if
  /// asked for; otherwise empty.
  std::vector<c10::IValue> outputs;
  /// Number of tokens in all microbatches and replicas, with kTokens.
  std::optional<int64_t> tokens;
  /// Dicts that the loss returned, with kTokens.
  std::vector<c10::IValue> metrics;
};

/// What became of an optimizer step.
struct OptimResult {
  /// Whether it was applied, on all ranks; otherwise a gradient was infinite or
  /// NaN on one of them.
  bool applied = true;
  /// Norm of the gradients of all stages before they were clipped, with
  /// `max_norm`.
  std::optional<double> grad_norm;
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

  /// Runs forward and backward of microbatches of any shapes.
  ///
  /// \param microbatches   arguments of the first stage, for each microbatch
  /// \param targets        second argument of the loss, for each microbatch
  /// \param return_outputs keep the last stage's outputs
  /// \throws PipelineError as `step`
  StepResult step_microbatches(
      const std::vector<std::vector<c10::IValue>>& microbatches,
      const std::vector<c10::IValue>& targets,
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

  /// Runs the forwards of microbatches of any shapes without gradients.
  ///
  /// \param microbatches   as for `step_microbatches`, of any number, which is
  ///                       that on the rank of the first stage
  /// \param targets        as for `step_microbatches`; none for no loss
  /// \param return_outputs keep the last stage's outputs
  /// \throws PipelineError as `eval`
  StepResult eval_microbatches(
      const std::vector<std::vector<c10::IValue>>& microbatches,
      const std::vector<c10::IValue>& targets = {},
      bool return_outputs = false);

  /// Steps the optimizers of all ranks as one. Collective.
  ///
  /// With `max_norm` the gradients of all stages, a tied weight counted once,
  /// are scaled down together to that norm, and all ranks skip the step if it
  /// is not finite.
  ///
  /// \param optimizer of this rank's parameters
  /// \param max_norm  largest norm of all gradients, nothing for any; alike on
  ///                  all ranks
  /// \throws PipelineError   on every rank if the optimizer of any fails
  /// \throws c10::ValueError on every rank if `max_norm` is negative or not
  ///     alike
  OptimResult optimizer_step(
      torch::optim::Optimizer& optimizer,
      std::optional<double> max_norm = std::nullopt);

  /// Scales the gradients of all stages down together, a tied weight counted
  /// once, for an optimizer that is not torch's. Collective.
  ///
  /// \param max_norm largest norm of all gradients
  /// \return whether the step is to be applied, the same on all ranks, and the
  ///     norm; gradients of a norm that is not finite are left alone
  /// \throws PipelineError   on every rank if any fails
  /// \throws c10::ValueError as `optimizer_step`
  OptimResult clip_grad_norm(double max_norm);

  /// Makes the gradients of this rank's stages undefined; `step` never does.
  void zero_grad();

  /// Steps that went well; random numbers of a deterministic run depend on it.
  uint64_t steps() const;
  /// Goes on where another run stopped.
  ///
  /// \param steps what `steps` returned there
  void set_steps(uint64_t steps);

  /// Ends the links and lets the groups go. Idempotent.
  void close();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Makes the step, eval or optimizer step at work in this process fail on all
/// ranks, with `KeyboardInterrupt` as its error type, as soon as it waits or
/// has a stage to call; a second call does not even wait for other ranks, and
/// ends the links for good. For signal handlers too.
TORCH_SM3_API void interrupt() noexcept;

} // namespace torch_sm3::pipeline
