// SPDX-License-Identifier: Apache-2.0
#include <runtime/gradients.h>

#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>
#include <set>

namespace torch_sm3::pipeline {
namespace {

using Known = std::set<const void*>;

bool first_time(Known* known, const at::Tensor& tensor) {
  return known->insert(tensor.unsafeGetTensorImpl()).second;
}

} // namespace

Gradients::Gradients(
    const std::vector<Stage>& stages,
    std::map<int64_t, Tie> ties,
    std::unique_ptr<Reducer> reducer,
    bool sums)
    : ties_(std::move(ties)),
      reducer_(std::move(reducer)),
      apart_(sums || !ties_.empty() || reducer_) {
  Known known;
  for (const Stage& stage : stages) {
    for (const at::Tensor& parameter : stage.parameters()) {
      if (first_time(&known, parameter)) {
        parameters_.push_back(parameter);
      }
    }
  }
}

bool Gradients::present() const {
  return std::any_of(
      parameters_.begin(), parameters_.end(), [](const at::Tensor& parameter) {
        return parameter.grad().defined();
      });
}

void Gradients::begin() {
  held_.clear();
  if (reducer_) {
    reducer_->begin();
  }
  for (const at::Tensor& parameter : parameters_) {
    if (apart_ && parameter.grad().defined()) {
      held_.emplace_back(parameter, parameter.grad());
      parameter.mutable_grad().reset();
    }
  }
}

void Gradients::collective(Action action, bool failed) {
  if (action.op == Op::kTieReduce) {
    const auto tie = ties_.find(action.microbatch);
    if (tie != ties_.end()) {
      tie->second.reduce(failed);
    }
  } else if (reducer_) {
    reducer_->start(action.stage, failed);
  }
}

void Gradients::wait() {
  if (reducer_) {
    reducer_->finish(/*keep=*/true);
  }
}

void Gradients::finish(const std::optional<double>& total) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters_) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (total && gradient.defined()) {
      *total == 0 ? gradient.zero_() : gradient.div_(*total);
    }
  }
  for (auto& [parameter, before] : held_) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (gradient.defined()) {
      before.add_(gradient);
    }
    gradient = before;
  }
  held_.clear();
}

void Gradients::drop(bool wait) {
  if (reducer_ && wait) {
    reducer_->finish(/*keep=*/false);
  }
  held_.clear();
  for (const at::Tensor& parameter : parameters_) {
    parameter.mutable_grad().reset();
  }
}

double Gradients::shrink(const Replicas* replicas) const {
  return reducer_ && reducer_->shrinks_sums()
             ? static_cast<double>(replicas->size())
             : 1.0;
}

std::vector<std::pair<int64_t, double>>
Gradients::squares(const std::vector<Stage>& stages) const {
  Known seen;
  for (const auto& entry : ties_) {
    for (const at::Tensor& weight : entry.second.repeated()) {
      first_time(&seen, weight);
    }
  }
  std::vector<std::pair<int64_t, double>> sums;
  for (const Stage& stage : stages) {
    double sum = 0;
    for (const at::Tensor& parameter : stage.parameters()) {
      const at::Tensor& gradient = parameter.grad();
      if (gradient.defined() && first_time(&seen, parameter)) {
        const auto norm =
            at::linalg_vector_norm(
                gradient,
                2,
                at::OptionalIntArrayRef(),
                /*keepdim=*/false,
                gradient.is_complex() ? at::kComplexDouble : at::kDouble)
                .item<double>();
        sum += norm * norm;
      }
    }
    sums.emplace_back(stage.index(), sum);
  }
  return sums;
}

} // namespace torch_sm3::pipeline
