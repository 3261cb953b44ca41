// SPDX-License-Identifier: Apache-2.0
// One step or eval of the C++ runner.
#include <runtime/random.h>
#include <runtime/runner_impl.h>

#include <torch_sm3/check.h>

#include <ATen/core/grad_mode.h>

namespace torch_sm3::pipeline {

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

StepResult PipelineRunner::Impl::run(const Given& given) {
  check_usable(given.training);
  return alone<StepResult>(given.training, [&] {
    ++calls_;
    if (transport_) {
      transport_->begin(calls_, !given.training);
    }
    std::optional<KeptGenerators> kept;
    if (!given.training) {
      kept.emplace(gradients_->parameters());
    }
    Machine& machine = machine_of(given);
    const bool held = given.training && gradients_->present();
    Batch batch;
    std::optional<Failure> wrong;
    try {
      batch = prepare(given, machine.program().schedule().microbatches);
    } catch (const std::exception& error) {
      wrong = Failure{
          rank_, first_stage(), 0, kArguments, type_of(error), text_of(error)};
    }
    machine.begin(given.training, batch.weights);
    if (wrong) {
      machine.fail(*wrong);
    }
    if (given.training) {
      gradients_->begin();
    }
    if (!drive(machine, batch)) {
      throw LinksLost();
    }
    return conclude(machine, batch, held);
  });
}

// The machine of a call. Evals of microbatches have as many as the rank of the
// first stage has: it tells the others where the first activation is due, so
// that a rank in a step notices at once that others are in an eval.
Machine& PipelineRunner::Impl::machine_of(const Given& given) {
  if (given.training) {
    return *step_;
  }
  const Schedule& schedule = step_->program().schedule();
  auto count = static_cast<int64_t>(schedule.microbatches);
  if (!given.whole) {
    const int64_t head = schedule.placement.front();
    const auto first_of = [&](int64_t rank) {
      int64_t stage = 0;
      while (schedule.placement[static_cast<size_t>(stage)] != rank) {
        ++stage;
      }
      return static_cast<uint16_t>(stage);
    };
    if (rank_ == head) {
      count = std::max<int64_t>(1, static_cast<int64_t>(given.inputs.size()));
      for (int64_t peer = 0; peer < ranks_; ++peer) {
        if (peer != rank_) {
          Header header;
          header.target = first_of(peer);
          send_value(
              *transport_, peer, Channel::kActivation, header, pack(count, ""));
        }
      }
    } else {
      Header header;
      header.target = first_of(rank_);
      count = receive_value(
                  *transport_, head, Channel::kActivation, header, &interrupts_)
                  .toInt();
    }
  }
  auto& machine = evals_[count];
  if (!machine) {
    machine = make_machine(
        forward_of(schedule, static_cast<uint32_t>(count)), /*user_ops=*/0);
  }
  return *machine;
}

// Cuts what this rank uses.
Batch PipelineRunner::Impl::prepare(const Given& given, int64_t count) const {
  Batch batch;
  TORCH_CHECK(
      !given.training || at::GradMode::is_enabled(),
      "step: expected gradients to be on, but got NoGradGuard; call eval for a "
      "forward without gradients");
  const Schedule& schedule = step_->program().schedule();
  if (schedule.placement.front() == rank_) {
    if (given.whole) {
      batch.inputs =
          cut(given.inputs.front(), count, options_.batch_dim, "inputs").values;
    } else {
      TORCH_SM3_CHECK_VALUE(
          given.inputs.size() == static_cast<size_t>(count),
          "step",
          "microbatches",
          c10::str("a list of ", count, " microbatches, as the schedule has"),
          given.inputs.size());
      batch.inputs = given.inputs;
    }
  }
  if (schedule.placement.back() == rank_) {
    batch.keep = given.keep;
    fill(given, count, &batch);
  }
  return batch;
}

// Targets, and what each microbatch's loss is worth.
void PipelineRunner::Impl::fill(const Given& given, int64_t count, Batch* batch)
    const {
  const bool none =
      given.targets.empty() || (given.whole && given.targets.front().isNone());
  TORCH_SM3_CHECK_VALUE(
      !given.training || !none,
      "step",
      "target",
      "a target for the loss",
      "None");
  if (none || !options_.loss) {
    return;
  }
  std::vector<int64_t> sizes(static_cast<size_t>(count), 0);
  if (given.whole) {
    CutValue parts =
        cut(given.targets.front(), count, options_.batch_dim, "target");
    batch->targets = std::move(parts.values);
    sizes = std::move(parts.sizes);
  } else {
    TORCH_SM3_CHECK_VALUE(
        given.targets.size() == static_cast<size_t>(count),
        "step",
        "targets",
        c10::str("a list of ", count, " targets, one for each microbatch"),
        given.targets.size());
    batch->targets = given.targets;
    for (size_t i = 0;
         options_.loss_reduction == LossReduction::kSamples && i < sizes.size();
         ++i) {
      sizes[i] = samples_of(given.targets[i], options_.batch_dim, "targets");
    }
  }
  batch->weights = loss_weights(options_.loss_reduction, sizes);
}

// Runs a machine to its end; false if the links were lost.
bool PipelineRunner::Impl::drive(Machine& machine, Batch& batch) {
  std::vector<Packed> answer;
  bool interrupted = false;
  while (true) {
    try {
      const Request request = machine.resume(std::move(answer), kSlice);
      answer.clear();
      if (request.kind == Request::Kind::kDone) {
        // All ranks hear of this step's failure anyway.
        if (machine.failed()) {
          interrupts_.take();
        }
        return true;
      }
      if (request.kind == Request::Kind::kLost) {
        return false;
      }
      if (interrupts_.take()) {
        if (interrupted) {
          throw Interrupted();
        }
        interrupted = true;
        machine.fail(kInterrupted, "interrupted");
      } else if (request.kind != Request::Kind::kWait) {
        answer = call(machine, request, batch);
      }
    } catch (const LinksLost&) {
      throw;
    } catch (const ReplicaLost&) {
      throw;
    } catch (const Interrupted&) {
      throw;
    } catch (const std::exception& error) {
      answer.clear();
      machine.fail(type_of(error), text_of(error));
    }
  }
}

std::vector<RankReport>
PipelineRunner::Impl::exchange_reports(const RankReport& own) {
  std::vector<RankReport> reports;
  for (const c10::IValue& value :
       exchange(transport_.get(), rank_, ranks_, value_of(own), &interrupts_)) {
    reports.push_back(read_report(value));
  }
  return reports;
}

StepResult PipelineRunner::Impl::conclude(
    const Machine& machine,
    Batch& batch,
    bool had_gradients) {
  const bool training = &machine == step_.get();
  const Schedule& schedule = machine.program().schedule();
  const auto last = static_cast<size_t>(schedule.placement.back());
  RankReport own{machine.failure(), had_gradients, {}};
  if (!machine.failed()) {
    // As an action behind all others.
    const auto index = static_cast<int64_t>(machine.program().row().size());
    try {
      if (training) {
        gradients_->wait();
      }
      own.verdict.total = divisor(options_.loss_reduction, batch);
      own.verdict.metrics = batch.metrics;
      std::tie(own.verdict.loss, own.verdict.losses) =
          reduced(batch, own.verdict.total);
    } catch (const LinksLost&) {
      throw;
    } catch (const ReplicaLost&) {
      throw;
    } catch (const std::exception& error) {
      own.verdict = {};
      own.failure.emplace(
          Failure{
              rank_,
              first_stage(),
              0,
              "REDUCE_GRAD",
              type_of(error),
              text_of(error)},
          index);
    }
  }
  RankReport told = own;
  if (!options_.share_loss) {
    told.verdict = {{}, {}, {}, own.verdict.total};
  }
  std::vector<RankReport> reports = exchange_reports(told);
  std::optional<double> total = reports.at(last).verdict.total;
  raise_failures(reports, training ? replicas_.get() : nullptr, &total);
  Verdict& verdict = static_cast<int64_t>(last) == rank_
                         ? own.verdict
                         : reports.at(last).verdict;
  StepResult result;
  result.loss = training ? guarded(verdict.loss) : verdict.loss;
  result.losses = training ? guarded(verdict.losses) : verdict.losses;
  result.outputs = std::move(batch.outputs);
  result.metrics = std::move(verdict.metrics);
  if (total) {
    result.tokens = static_cast<int64_t>(*total);
  }
  if (training) {
    ++steps_;
    if (total) {
      total = *total / gradients_->shrink(replicas_.get());
    }
    gradients_->finish(total);
  }
  return result;
}

} // namespace torch_sm3::pipeline
