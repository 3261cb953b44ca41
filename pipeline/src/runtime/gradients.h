// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <runtime/reducer.h>
#include <runtime/ties.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace torch_sm3::pipeline {

// What happens to the gradients of one rank around the backwards of a step.
// Those that were there before are set aside, wherever those of the step are
// changed as a whole, and added at the end.
class Gradients {
 public:
  Gradients(
      const std::vector<Stage>& stages,
      std::map<int64_t, Tie> ties,
      std::unique_ptr<Reducer> reducer,
      bool sums);

  // Each parameter of the rank once.
  const std::vector<at::Tensor>& parameters() const {
    return parameters_;
  }
  bool present() const;

  void begin();
  // REDUCE_GRAD or TIE_REDUCE.
  void collective(Action action, bool failed);
  // Waits for the reductions; their results become the gradients.
  void wait();
  // Divides, by nothing without a `total`, zero making zeros; adds the
  // gradients of earlier steps.
  void finish(const std::optional<double>& total);
  // Throws all gradients away after a failed step; waits for reductions that
  // other replicas take part in, unless these are lost.
  void drop(bool wait);

  // By how much the reduction of sums makes them too small.
  double shrink(const Replicas* replicas) const;
  // The sum of squares of each stage's gradients, tied weights counted on the
  // lowest stage.
  std::vector<std::pair<int64_t, double>>
  squares(const std::vector<Stage>& stages) const;

 private:
  std::vector<at::Tensor> parameters_;
  std::map<int64_t, Tie> ties_;
  std::unique_ptr<Reducer> reducer_;
  bool apart_;
  std::vector<std::pair<at::Tensor, at::Tensor>> held_;
};

} // namespace torch_sm3::pipeline
