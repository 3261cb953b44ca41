// SPDX-License-Identifier: Apache-2.0
// The life of a C++ runner: what it is made of, and how its calls end.
#include <runtime/runner_impl.h>

#include <torch_sm3/check.h>

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <mutex>
#include <set>

namespace torch_sm3::pipeline {
namespace {

constexpr uint32_t kUserOps = 1u << static_cast<uint32_t>(Op::kReduceGrad) |
                              1u << static_cast<uint32_t>(Op::kTieReduce);

std::vector<int64_t> first_stages(const Schedule& schedule) {
  std::vector<int64_t> first(schedule.ranks, 0);
  for (uint32_t stage = schedule.stages; stage-- > 0;) {
    first.at(schedule.placement[stage]) = stage;
  }
  return first;
}

std::vector<Stage> in_order(std::vector<Stage> stages) {
  std::stable_sort(
      stages.begin(), stages.end(), [](const Stage& a, const Stage& b) {
        return a.index() < b.index();
      });
  return stages;
}

// Groups that open runners use. Two on one would take each other's messages.
std::mutex claiming;
std::set<const void*> claimed;

// Holds a group until the last copy of the result is gone.
std::shared_ptr<const void> claim(const void* group) {
  const std::lock_guard<std::mutex> lock(claiming);
  TORCH_CHECK(
      claimed.insert(group).second,
      "PipelineRunner: expected a group that no other open runner uses, but "
      "got one that does; close that one, or give each a group of its own");
  return {group, [](const void* held) {
            const std::lock_guard<std::mutex> unlock(claiming);
            claimed.erase(held);
          }};
}

} // namespace

PipelineRunner::Impl::Impl(
    const Schedule& schedule,
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    std::vector<Stage> stages,
    RunnerOptions options)
    : options_(std::move(options)), stages_(in_order(std::move(stages))) {
  if (group && group->getSize() > 1) {
    rank_ = group->getRank();
    ranks_ = group->getSize();
    claim_ = claim(group.get());
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
    const Agreement known =
        agree(transport_.get(), rank_, ranks_, schedule, stages_, options_);
    step_ = make_machine(known.schedule, kUserOps);
    connect(known);
  } catch (const LinksLost&) {
    give_up();
  }
}

std::unique_ptr<Machine>
PipelineRunner::Impl::make_machine(Schedule schedule, uint32_t user_ops) const {
  auto machine = std::make_unique<Machine>(
      std::make_shared<const RankProgram>(
          std::move(schedule), static_cast<uint32_t>(rank_)),
      transport_.get(),
      user_ops);
  for (const Stage& stage : stages_) {
    const auto index = static_cast<uint16_t>(stage.index());
    machine->set_split(index, stage.split());
    if (stage.has_overlap()) {
      machine->set_fused(index);
    }
  }
  return machine;
}

// Ties and reductions.
void PipelineRunner::Impl::connect(const Agreement& known) {
  std::map<int64_t, Tie> ties;
  const auto routes = static_cast<uint32_t>(known.schedule.routes.size());
  for (uint32_t number = 0; number < known.ties.size(); ++number) {
    const auto& members = known.ties[number];
    if (std::any_of(members.begin(), members.end(), [&](const Member& one) {
          return one.rank == rank_;
        })) {
      // Behind the channels of the routes.
      const Channel channel = channel_of_route(routes + number, false);
      const auto [tie, fresh] =
          ties.emplace(number, Tie(channel, members, rank_, transport_.get()));
      tie->second.broadcast();
    }
  }
  std::unique_ptr<Reducer> reducer;
  const bool sums = options_.loss_reduction == LossReduction::kTokens;
  if (options_.data_parallel && options_.data_parallel->getSize() > 1) {
    replicas_ = std::make_unique<Replicas>(
        options_.data_parallel, options_.timeout, transport_.get());
    reducer = std::make_unique<Reducer>(
        replicas_.get(), options_, reduction_order(), sums);
  }
  gradients_ = std::make_unique<Gradients>(
      stages_, std::move(ties), std::move(reducer), sums);
}

std::vector<Stage> PipelineRunner::Impl::reduction_order() const {
  std::vector<Stage> order;
  for (const Action action : step_->program().row()) {
    if (action.op == Op::kReduceGrad) {
      order.push_back(stage(action.stage));
    }
  }
  return order;
}

void PipelineRunner::Impl::zero_grad() {
  for (const at::Tensor& parameter : gradients_->parameters()) {
    parameter.mutable_grad().reset();
  }
}

void PipelineRunner::Impl::close() {
  if (closed_) {
    return;
  }
  closed_ = true;
  if (transport_) {
    transport_->close();
    claim_.reset();
  }
}

int64_t PipelineRunner::Impl::first_stage() const {
  return stages_.empty() ? 0 : stages_.front().index();
}

const Stage& PipelineRunner::Impl::stage(uint16_t index) const {
  return *std::find_if(stages_.begin(), stages_.end(), [&](const Stage& one) {
    return one.index() == index;
  });
}

// Throws the error of a call after which the links are of no use any more.
void PipelineRunner::Impl::give_up() {
  if (transport_) {
    lost_ = read_failure(transport_->failure());
    // The alarm must leave before this process may end.
    transport_->flush(1.0);
  }
  raise_lost(*lost_);
}

// Runs a call unless another one is at work; ends the links for good where
// something else than an action goes wrong.
template <class Result>
Result PipelineRunner::Impl::alone(
    bool training,
    const std::function<Result()>& work) {
  TORCH_CHECK(
      !busy_.exchange(true),
      "PipelineRunner: expected no other call at work on the same runner, but "
      "got one; call one after the other");
  struct Free {
    std::atomic<bool>& busy;
    ~Free() {
      busy = false;
    }
  } free{busy_};
  interrupts_ = Interrupts();
  const auto end = [&](const char* type, const std::string& text) {
    lost_ = Failure{rank_, first_stage(), 0, "", type, text};
    if (transport_) {
      transport_->fail(structure_of(*lost_));
    }
    gradients_->drop(/*wait=*/false);
  };
  try {
    return work();
  } catch (const LinksLost&) {
    if (training) {
      gradients_->drop(/*wait=*/false);
    }
    give_up();
  } catch (const Interrupted&) {
    end(kInterrupted, "interrupted");
    give_up();
  } catch (const ReplicaLost& error) {
    end(error.type(), error.what());
    give_up();
  } catch (...) {
    if (training) {
      gradients_->drop(/*wait=*/true);
    }
    throw;
  }
}

template StepResult PipelineRunner::Impl::alone(
    bool training,
    const std::function<StepResult()>& work);
template OptimResult PipelineRunner::Impl::alone(
    bool training,
    const std::function<OptimResult()>& work);

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
  return impl_->run(
      {true,
       return_outputs,
       true,
       {c10::ivalue::Tuple::create(inputs)},
       {target}});
}

StepResult PipelineRunner::eval(
    const std::vector<c10::IValue>& inputs,
    const c10::IValue& target,
    bool return_outputs) {
  const at::NoGradGuard no_grad;
  return impl_->run(
      {false,
       return_outputs,
       true,
       {c10::ivalue::Tuple::create(inputs)},
       {target}});
}

namespace {

std::vector<c10::IValue>
tuples(const std::vector<std::vector<c10::IValue>>& microbatches) {
  std::vector<c10::IValue> values;
  values.reserve(microbatches.size());
  for (const auto& one : microbatches) {
    values.emplace_back(c10::ivalue::Tuple::create(one));
  }
  return values;
}

} // namespace

StepResult PipelineRunner::step_microbatches(
    const std::vector<std::vector<c10::IValue>>& microbatches,
    const std::vector<c10::IValue>& targets,
    bool return_outputs) {
  return impl_->run(
      {true, return_outputs, false, tuples(microbatches), targets});
}

StepResult PipelineRunner::eval_microbatches(
    const std::vector<std::vector<c10::IValue>>& microbatches,
    const std::vector<c10::IValue>& targets,
    bool return_outputs) {
  const at::NoGradGuard no_grad;
  return impl_->run(
      {false, return_outputs, false, tuples(microbatches), targets});
}

OptimResult PipelineRunner::optimizer_step(
    torch::optim::Optimizer& optimizer,
    std::optional<double> max_norm) {
  return impl_->optimize(&optimizer, max_norm);
}

OptimResult PipelineRunner::clip_grad_norm(double max_norm) {
  return impl_->optimize(nullptr, max_norm);
}

void PipelineRunner::zero_grad() {
  impl_->zero_grad();
}

uint64_t PipelineRunner::steps() const {
  return impl_->steps();
}

void PipelineRunner::set_steps(uint64_t steps) {
  impl_->set_steps(steps);
}

void PipelineRunner::close() {
  impl_->close();
}

} // namespace torch_sm3::pipeline
