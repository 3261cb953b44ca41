// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <runtime/agree.h>
#include <runtime/batch.h>
#include <runtime/control.h>
#include <runtime/gradients.h>
#include <runtime/machine.h>
#include <runtime/outcome.h>

#include <torch_sm3/pipeline/runtime.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

class PipelineRunner::Impl {
 public:
  // What a call was given: whole values, or those of each microbatch.
  struct Given {
    bool training = true;
    bool keep = false;
    bool whole = true;
    std::vector<c10::IValue> inputs; // with `whole` a single one: a tuple
    std::vector<c10::IValue> targets;
  };

  Impl(
      const Schedule& schedule,
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      std::vector<Stage> stages,
      RunnerOptions options);

  StepResult run(const Given& given);
  // Only clips without an optimizer.
  OptimResult optimize(
      torch::optim::Optimizer* optimizer,
      const std::optional<double>& max_norm);
  void zero_grad();
  void close();

  uint64_t steps() const {
    return steps_;
  }
  void set_steps(uint64_t steps) {
    steps_ = steps;
  }

 private:
  // runtime.cpp
  void connect(const Agreement& known);
  std::vector<Stage> reduction_order() const;
  std::unique_ptr<Machine>
  make_machine(Schedule schedule, uint32_t user_ops) const;
  int64_t first_stage() const;
  const Stage& stage(uint16_t index) const;
  template <class Result>
  Result alone(bool training, const std::function<Result()>& work);
  [[noreturn]] void give_up();

  // step.cpp
  void check_usable(bool training) const;
  Machine& machine_of(const Given& given);
  Batch prepare(const Given& given, int64_t count) const;
  void fill(const Given& given, int64_t count, Batch* batch) const;
  bool drive(Machine& machine, Batch& batch);
  StepResult conclude(const Machine& machine, Batch& batch, bool had_gradients);
  std::vector<RankReport> exchange_reports(const RankReport& own);

  // call.cpp
  std::vector<Packed>
  call(Machine& machine, const Request& request, Batch& batch);
  c10::IValue
  run(Machine& machine,
      const Stage& body,
      const Request& request,
      const Batch& batch) const;
  std::vector<c10::IValue>
  arguments(Action action, const Request& request, const Batch& batch) const;
  std::vector<Packed> parts(
      const RankProgram& program,
      const Stage& stage,
      const c10::IValue& output) const;

  // optimize.cpp
  RankReport attempt(const std::function<void()>& act) const;
  OptimResult
  clip(torch::optim::Optimizer* optimizer, double max_norm, double norm);

  const RunnerOptions options_;
  std::vector<Stage> stages_; // in ascending order
  int64_t rank_ = 0;
  int64_t ranks_ = 1;
  std::shared_ptr<const void> claim_; // the group, which no other runner uses
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Replicas> replicas_;
  std::unique_ptr<Gradients> gradients_;
  std::unique_ptr<Machine> step_;
  std::map<int64_t, std::unique_ptr<Machine>> evals_; // by microbatches
  Interrupts interrupts_;
  std::atomic<bool> busy_{false};
  uint64_t calls_ = 0;
  uint64_t steps_ = 0; // those that went well
  bool closed_ = false;
  std::optional<Failure> lost_;
};

} // namespace torch_sm3::pipeline
