// SPDX-License-Identifier: Apache-2.0
// Steps of the C++ runner.
#include <runtime/runner_impl.h>

#include <torch_sm3/check.h>

#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

std::vector<int64_t> first_stages(const Schedule& schedule) {
  std::vector<int64_t> first(schedule.ranks, 0);
  for (uint32_t stage = schedule.stages; stage-- > 0;) {
    first.at(schedule.placement[stage]) = stage;
  }
  return first;
}

} // namespace

PipelineRunner::Impl::Impl(
    const Schedule& schedule,
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    std::vector<Stage> stages,
    RunnerOptions options)
    : options_(std::move(options)), stages_(std::move(stages)) {
  if (group && group->getSize() > 1) {
    rank_ = group->getRank();
    ranks_ = group->getSize();
    transport_ = std::make_unique<Transport>(
        std::move(group),
        TransportOptions{
            options_.timeout,
            options_.max_pending,
            kHub,
            first_stages(schedule),
            options_.link_delay});
  }
  try {
    const Schedule lowered =
        agree(transport_.get(), rank_, ranks_, schedule, stages_, options_);
    const auto machine = [&](Schedule one) {
      return std::make_unique<Machine>(
          std::make_shared<const RankProgram>(
              std::move(one), static_cast<uint32_t>(rank_)),
          transport_.get(),
          /*user_ops=*/0);
    };
    step_ = machine(lowered);
    eval_ = machine(forward_of(lowered, lowered.microbatches));
  } catch (const LinksLost&) {
    give_up();
  }
}

void PipelineRunner::Impl::close() {
  closed_ = true;
  if (transport_) {
    transport_->close();
  }
}

void PipelineRunner::Impl::check_usable(bool training) const {
  TORCH_CHECK(
      !closed_, "PipelineRunner: expected an open runner, but got close()");
  if (lost_) {
    raise_lost(*lost_);
  }
  TORCH_CHECK(
      !training || step_->program().trains(),
      "step: expected a schedule with backwards, but got kind forward; call "
      "eval instead");
}

StepResult PipelineRunner::Impl::run(
    const std::vector<c10::IValue>& inputs,
    const c10::IValue& target,
    bool keep,
    bool training) {
  check_usable(training);
  const auto weights = parameters();
  const bool had_gradients =
      training &&
      std::any_of(weights.begin(), weights.end(), [](const at::Tensor& weight) {
        return weight.grad().defined();
      });
  Machine& machine = training ? *step_ : *eval_;
  Batch batch;
  std::optional<Failure> wrong;
  try {
    batch = prepare(inputs, target, keep, training);
  } catch (const std::exception& error) {
    const int64_t first = first_stages(machine.program().schedule()).at(rank_);
    wrong =
        Failure{rank_, first, 0, kArguments, type_of(error), text_of(error)};
  }
  ++runs_;
  if (transport_) {
    transport_->begin(runs_, !training);
  }
  machine.begin(training, batch.weights);
  if (wrong) {
    machine.fail(*wrong);
  }
  try {
    if (!drive(machine, batch)) {
      throw LinksLost();
    }
    return conclude(machine, batch, had_gradients);
  } catch (const LinksLost&) {
    drop_gradients(training);
    give_up();
  } catch (...) {
    drop_gradients(training);
    throw;
  }
}

// Cuts what this rank uses.
Batch PipelineRunner::Impl::prepare(
    const std::vector<c10::IValue>& inputs,
    const c10::IValue& target,
    bool keep,
    bool training) const {
  const Schedule& schedule = step_->program().schedule();
  const auto m = static_cast<int64_t>(schedule.microbatches);
  Batch batch;
  TORCH_CHECK_VALUE(
      !training || at::GradMode::is_enabled(),
      "step: expected gradients to be on, but got NoGradGuard; call eval for a "
      "forward without gradients");
  if (schedule.placement.front() == rank_) {
    batch.inputs =
        cut(c10::ivalue::Tuple::create(inputs), m, options_.batch_dim, "inputs")
            .values;
  }
  if (schedule.placement.back() == rank_) {
    batch.keep = keep;
    TORCH_SM3_CHECK_VALUE(
        !training || !target.isNone(),
        "step",
        "target",
        "a target for the loss",
        "None");
    if (!target.isNone() && options_.loss) {
      CutValue parts = cut(target, m, options_.batch_dim, "target");
      batch.targets = std::move(parts.values);
      batch.weights = loss_weights(options_.loss_reduction, parts.sizes);
    }
  }
  return batch;
}

// Runs a machine to its end; false if the links were lost.
bool PipelineRunner::Impl::drive(Machine& machine, Batch& batch) {
  std::vector<Packed> answer;
  while (true) {
    try {
      const Request request = machine.resume(std::move(answer), kSlice);
      answer.clear();
      if (request.kind == Request::Kind::kDone) {
        return true;
      }
      if (request.kind == Request::Kind::kLost) {
        return false;
      }
      if (request.kind == Request::Kind::kUser) {
        answer = call(machine, request, batch);
      }
    } catch (const std::exception& error) {
      answer.clear();
      machine.fail(type_of(error), text_of(error));
    }
  }
}

StepResult PipelineRunner::Impl::conclude(
    const Machine& machine,
    Batch& batch,
    bool had_gradients) {
  RankReport own{machine.failure(), had_gradients, {}, {}};
  const auto rows = static_cast<int64_t>(machine.program().row().size());
  try {
    if (!machine.failed()) {
      std::tie(own.loss, own.losses) = reduced(batch);
    }
  } catch (const std::exception& error) {
    const int64_t last = machine.program().schedule().stages - 1;
    own.failure.emplace(
        Failure{rank_, last, 0, "loss", type_of(error), text_of(error)}, rows);
  }
  const auto values = exchange(transport_.get(), rank_, ranks_, value_of(own));
  std::vector<RankReport> reports;
  reports.reserve(values.size());
  for (const c10::IValue& value : values) {
    reports.push_back(read_report(value));
  }
  raise_failures(reports);
  const RankReport& last =
      reports.at(machine.program().schedule().placement.back());
  return {last.loss, last.losses, std::move(batch.outputs)};
}

// Throws the error of a step after which the links are of no use any more.
void PipelineRunner::Impl::give_up() {
  lost_ = read_failure(transport_->failure());
  // The alarm must leave before this process may end.
  transport_->flush(1.0);
  raise_lost(*lost_);
}

std::vector<at::Tensor> PipelineRunner::Impl::parameters() const {
  std::vector<at::Tensor> all;
  for (const Stage& stage : stages_) {
    all.insert(all.end(), stage.parameters().begin(), stage.parameters().end());
  }
  return all;
}

// A partial sum is never left behind.
void PipelineRunner::Impl::drop_gradients(bool training) const {
  for (const at::Tensor& parameter : parameters()) {
    if (training) {
      parameter.mutable_grad().reset();
    }
  }
}

const Stage& PipelineRunner::Impl::stage(uint16_t index) const {
  return *std::find_if(stages_.begin(), stages_.end(), [&](const Stage& one) {
    return one.index() == index;
  });
}

PipelineRunner::PipelineRunner(
    const Schedule& schedule,
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    std::vector<Stage> stages,
    RunnerOptions options)
    : impl_(
          std::make_unique<Impl>(
              schedule,
              std::move(group),
              std::move(stages),
              std::move(options))) {}

PipelineRunner::~PipelineRunner() {
  impl_->close();
}

StepResult PipelineRunner::step(
    const std::vector<c10::IValue>& inputs,
    const c10::IValue& target,
    bool return_outputs) {
  return impl_->run(inputs, target, return_outputs, /*training=*/true);
}

StepResult PipelineRunner::eval(
    const std::vector<c10::IValue>& inputs,
    const c10::IValue& target,
    bool return_outputs) {
  const at::NoGradGuard no_grad;
  return impl_->run(inputs, target, return_outputs, /*training=*/false);
}

void PipelineRunner::close() {
  impl_->close();
}

} // namespace torch_sm3::pipeline
