// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The parts into which a model is cut.

#include <torch_sm3/export.h>
#include <torch_sm3/pipeline/backward.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <map>
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

  /// Lets the backward run in two parts where the schedule says so, always
  /// (then a stage with nothing to split is an error), or never.
  ///
  /// \param split kAuto unless this is called
  Stage& split(Split split);

  /// Makes a weight one with those of the same name in any stage: they have the
  /// bits of that on the lowest stage when the runner is made, and the same
  /// summed gradient after each step.
  ///
  /// \param name   of the shared weight, equal in all stages that hold it
  /// \param weight one of the stage's parameters
  Stage& tie(std::string name, const at::Tensor& weight);

  /// Leaves the stage out of the data-parallel reduction, or not.
  ///
  /// \param reduce true unless this is called
  Stage& reduce(bool reduce);

  /// A forward with the backward of another microbatch beside it: takes the
  /// arguments of the forward, returns what it would, and calls `backward`
  /// once.
  using Overlap = std::function<c10::IValue(
      std::vector<c10::IValue> arguments,
      const std::function<void()>& backward)>;

  /// Runs the cells `(F;B)OVERLAP_F_B` whose forward is this stage's in one
  /// call; without it F runs first and B after it.
  ///
  /// \param overlap any function; what a route brings comes after the other
  ///                arguments, in the order of its names
  Stage& overlap(Overlap overlap);

  /// Its number.
  int64_t index() const {
    return index_;
  }
  /// Target of each routed item.
  const std::map<std::string, int64_t>& routes() const {
    return routes_;
  }
  /// Its weights.
  const std::vector<at::Tensor>& parameters() const {
    return parameters_;
  }
  /// Whether its backward runs in two parts.
  Split split() const {
    return split_;
  }
  /// Its tied weights, with the names they share.
  const std::vector<std::pair<std::string, at::Tensor>>& ties() const {
    return ties_;
  }
  /// Whether its gradients are reduced over data-parallel replicas.
  bool reduce() const {
    return reduce_;
  }
  /// Whether it has a function for pairs.
  bool has_overlap() const {
    return static_cast<bool>(overlap_);
  }

  /// Runs the forward.
  ///
  /// \param arguments by position
  /// \param keywords  what routes bring
  c10::IValue operator()(
      std::vector<c10::IValue> arguments,
      const Keywords& keywords) const {
    return call_(std::move(arguments), keywords);
  }

  /// Runs a pair.
  ///
  /// \param arguments by position
  /// \param keywords  what routes bring
  /// \param backward  runs the backward
  c10::IValue operator()(
      std::vector<c10::IValue> arguments,
      const Keywords& keywords,
      const std::function<void()>& backward) const;

 private:
  using Call =
      std::function<c10::IValue(std::vector<c10::IValue>, const Keywords&)>;

  int64_t index_;
  Call call_;
  std::vector<at::Tensor> parameters_;
  std::map<std::string, int64_t> routes_;
  Split split_ = Split::kAuto;
  std::vector<std::pair<std::string, at::Tensor>> ties_;
  bool reduce_ = true;
  Overlap overlap_;
};

} // namespace torch_sm3::pipeline
