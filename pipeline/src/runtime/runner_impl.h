// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <runtime/batch.h>
#include <runtime/control.h>
#include <runtime/machine.h>

#include <torch_sm3/pipeline/runtime.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

// Checks the arguments of a runner on all ranks together and returns the
// schedule with its messages. A ValueError is the same on all ranks.
Schedule agree(
    Transport* transport,
    int64_t rank,
    int64_t ranks,
    const Schedule& schedule,
    const std::vector<Stage>& stages,
    const RunnerOptions& options);

class PipelineRunner::Impl {
 public:
  Impl(
      const Schedule& schedule,
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      std::vector<Stage> stages,
      RunnerOptions options);

  StepResult
  run(const std::vector<c10::IValue>& inputs,
      const c10::IValue& target,
      bool keep,
      bool training);
  void close();

 private:
  void check_usable(bool training) const;
  Batch prepare(
      const std::vector<c10::IValue>& inputs,
      const c10::IValue& target,
      bool keep,
      bool training) const;
  bool drive(Machine& machine, Batch& batch);
  std::vector<Packed>
  call(const Machine& machine, const Request& request, Batch& batch);
  std::vector<c10::IValue>
  arguments(Action action, const Request& request, const Batch& batch) const;
  std::vector<Packed> parts(
      const RankProgram& program,
      const Stage& stage,
      const c10::IValue& output) const;
  StepResult conclude(const Machine& machine, Batch& batch, bool had_gradients);
  [[noreturn]] void give_up();
  std::vector<at::Tensor> parameters() const;
  void drop_gradients(bool training) const;
  const Stage& stage(uint16_t index) const;

  const RunnerOptions options_;
  const std::vector<Stage> stages_;
  int64_t rank_ = 0;
  int64_t ranks_ = 1;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Machine> step_;
  std::unique_ptr<Machine> eval_;
  uint64_t runs_ = 0;
  bool closed_ = false;
  std::optional<Failure> lost_;
};

} // namespace torch_sm3::pipeline
