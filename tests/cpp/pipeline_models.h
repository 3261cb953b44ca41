// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Small models cut into stages, and the loop that a pipeline must equal.

#include <torch_sm3/pipeline/runtime.h>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/jit/api/module.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace torch_sm3::pipeline {

using Pair = std::pair<at::Tensor, at::Tensor>;

inline constexpr int64_t kWidth = 6;

/// Numbers of equal bits in each call, whatever other threads draw.
inline at::Tensor numbers(at::IntArrayRef sizes, int64_t seed) {
  int64_t count = 1;
  for (const int64_t size : sizes) {
    count *= size;
  }
  return at::sin(at::arange(seed, seed + count, at::kFloat) * 1.7).view(sizes);
}

inline Pair make_batch(int64_t samples) {
  return {numbers({samples, kWidth}, 3), numbers({samples, kWidth}, 77)};
}

inline at::Tensor
loss_of(const c10::IValue& output, const c10::IValue& target) {
  return at::mse_loss(output.toTensor(), target.toTensor());
}

inline RunnerOptions options() {
  RunnerOptions options;
  options.loss = loss_of;
  options.timeout = 60.0;
  return options;
}

inline std::vector<at::Tensor> weights(int64_t count) {
  std::vector<at::Tensor> all;
  for (int64_t i = 0; i < count; ++i) {
    all.push_back(numbers({kWidth, kWidth}, 11 * i).requires_grad_());
  }
  return all;
}

/// Stages that pass a stream, a second one and the number of their calls so
/// far.
class Model {
 public:
  explicit Model(int64_t stages) : weights_(weights(stages)) {}

  /// Called with each stage's output; may throw, or hang a hook on it.
  std::function<void(int64_t stage, const at::Tensor& output)> watch;

  c10::IValue run(int64_t stage, const std::vector<c10::IValue>& inputs) const {
    at::Tensor x = inputs.at(0).toTensor();
    at::Tensor side = inputs.size() > 1 ? inputs.at(1).toTensor() : at::cos(x);
    if (stage > 0) {
      x.add_(side, 0.5); // in place, as a stage may
      TORCH_CHECK(inputs.at(2).toInt() == stage);
    }
    const at::Tensor y = at::tanh(at::matmul(x, weights_[stage]));
    if (watch) {
      watch(stage, y);
    }
    if (stage + 1 == static_cast<int64_t>(weights_.size())) {
      return y;
    }
    return c10::ivalue::Tuple::create({y, side * 2, stage + 1});
  }

  std::vector<Stage> stages_of(const Schedule& schedule, int rank) const {
    std::vector<Stage> own;
    for (uint32_t stage = 0; stage < schedule.stages; ++stage) {
      if (schedule.placement[stage] == static_cast<uint32_t>(rank)) {
        own.emplace_back(
            stage,
            [this, stage](const std::vector<c10::IValue>& inputs) {
              return run(stage, inputs);
            },
            std::vector<at::Tensor>{weights_[stage]});
      }
    }
    return own;
  }

  /// One loop over the microbatches; returns the mean loss.
  at::Tensor train(const Pair& batch, int64_t m) const {
    const auto xs = batch.first.tensor_split(m);
    const auto ys = batch.second.tensor_split(m);
    at::Tensor total = at::zeros({});
    for (int64_t i = 0; i < m; ++i) {
      c10::IValue value = xs[i];
      for (size_t stage = 0; stage < weights_.size(); ++stage) {
        value =
            run(static_cast<int64_t>(stage),
                value.isTuple() ? copied(value.toTupleRef().elements().vec())
                                : std::vector<c10::IValue>{value});
      }
      const at::Tensor loss = loss_of(value, ys[i]);
      const double each = 1.0 / static_cast<double>(m);
      loss.backward(at::full_like(loss, each));
      total = total + loss.detach() * each;
    }
    return total;
  }

  bool same_gradients(const Model& other, int64_t stage) const {
    return at::equal(weights_[stage].grad(), other.weights_[stage].grad());
  }
  const std::vector<at::Tensor>& parameters() const {
    return weights_;
  }
  at::Tensor gradient(int64_t stage) const {
    return weights_[stage].grad();
  }
  bool has_gradients() const {
    for (const at::Tensor& weight : weights_) {
      if (weight.grad().defined()) {
        return true;
      }
    }
    return false;
  }

 private:
  // Stages change their inputs in place; autograd keeps the others'.
  static std::vector<c10::IValue> copied(std::vector<c10::IValue> values) {
    for (c10::IValue& value : values) {
      if (value.isTensor()) {
        value = value.toTensor().clone();
      }
    }
    return values;
  }

  std::vector<at::Tensor> weights_;
};

/// Three stages; the first one's output goes to the last one, too.
class RoutedModel {
 public:
  RoutedModel() : weights_(weights(3)) {}

  at::Tensor first(const at::Tensor& x) const {
    return at::tanh(at::matmul(x, weights_[0]));
  }
  at::Tensor second(const at::Tensor& x) const {
    return at::matmul(x, weights_[1]);
  }
  at::Tensor third(const at::Tensor& x, const at::Tensor& skip) const {
    return at::matmul(x * skip, weights_[2]);
  }

  void train(const Pair& batch, int64_t m) const {
    const auto xs = batch.first.tensor_split(m);
    const auto ys = batch.second.tensor_split(m);
    for (int64_t i = 0; i < m; ++i) {
      const at::Tensor h = first(xs[i]);
      const at::Tensor loss = loss_of(third(second(h), h), ys[i]);
      loss.backward(at::full_like(loss, 1.0 / static_cast<double>(m)));
    }
  }

  std::vector<Stage> stages_of(const Schedule& schedule, int rank) const {
    using Values = std::vector<c10::IValue>;
    const std::vector<Stage::Body> bodies{
        [this](const Values& in) {
          const at::Tensor h = first(in.at(0).toTensor());
          c10::impl::GenericDict out(
              c10::StringType::get(), c10::AnyType::get());
          out.insert("x", h);
          out.insert("skip", h);
          return out;
        },
        [this](const Values& in) {
          return second(in.at(0).toGenericDict().at("x").toTensor());
        },
        [this](const Values& in) {
          return third(in.at(0).toTensor(), in.at(1).toTensor());
        }};
    std::vector<Stage> own;
    for (int64_t stage = 0; stage < 3; ++stage) {
      if (schedule.placement[stage] == static_cast<uint32_t>(rank)) {
        own.emplace_back(
            stage, bodies[stage], std::vector<at::Tensor>{weights_[stage]});
        if (stage == 0) {
          own.back().route("skip", 2);
        }
      }
    }
    return own;
  }

  /// Whether the weights of a rank have the gradients of another model, up to
  /// the order in which the two ways' gradients are added.
  bool same_gradients(
      const RoutedModel& other,
      const Schedule& schedule,
      int rank) const {
    bool same = true;
    for (size_t stage = 0; stage < 3; ++stage) {
      if (schedule.placement[stage] == static_cast<uint32_t>(rank)) {
        same =
            same &&
            at::allclose(weights_[stage].grad(), other.weights_[stage].grad());
      }
    }
    return same;
  }

 private:
  std::vector<at::Tensor> weights_;
};

/// A scripted module with one weight, from source text.
inline torch::jit::Module scripted_head() {
  torch::jit::Module module("Head");
  module.register_parameter(
      "weight", numbers({kWidth, kWidth}, 5).requires_grad_(), false);
  module.define(
      "def forward(self, x):\n  return torch.matmul(x, self.weight)\n");
  return module;
}

/// All forwards, stage by stage, then all backwards, whole or I and W, with
/// messages.
inline Schedule all_forwards_first(
    const std::vector<uint32_t>& placement,
    uint32_t m,
    bool split,
    const std::vector<Route>& routes = {}) {
  Schedule schedule;
  schedule.kind = "test";
  schedule.stages = static_cast<uint32_t>(placement.size());
  schedule.microbatches = m;
  schedule.placement = placement;
  schedule.routes = routes;
  schedule.ranks = *std::max_element(placement.begin(), placement.end()) + 1;
  schedule.rows.resize(schedule.ranks);
  const auto add = [&](Op op, uint32_t stage, uint32_t i) {
    schedule.rows[placement[stage]].push_back(
        {op, 0, static_cast<uint16_t>(stage), i});
  };
  for (uint32_t stage = 0; stage < schedule.stages; ++stage) {
    for (uint32_t i = 0; i < m; ++i) {
      add(Op::kForward, stage, i);
    }
  }
  for (uint32_t stage = schedule.stages; stage-- > 0;) {
    for (uint32_t i = 0; i < m; ++i) {
      add(split ? Op::kBackwardInput : Op::kBackward, stage, i);
    }
    for (uint32_t i = 0; split && i < m; ++i) {
      add(Op::kBackwardWeight, stage, i);
    }
  }
  return schedule.lower();
}

} // namespace torch_sm3::pipeline
