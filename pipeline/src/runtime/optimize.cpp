// SPDX-License-Identifier: Apache-2.0
// The optimizer's step as one of the whole pipeline: norm, clip, skip.
#include <runtime/runner_impl.h>

#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>

namespace torch_sm3::pipeline {
namespace {

// What a rank found in its gradients.
struct Found {
  bool failed = false;
  std::vector<std::pair<int64_t, double>> squares; // by stage
};

c10::IValue value_of(const Found& found) {
  std::vector<c10::IValue> items{found.failed};
  for (const auto& [stage, sum] : found.squares) {
    items.push_back(c10::ivalue::Tuple::create({stage, sum}));
  }
  return c10::ivalue::Tuple::create(std::move(items));
}

// Adds the sums of all stages in their order, so that the bits do not depend on
// the ranks; false if a rank failed.
bool norm_of(const std::vector<c10::IValue>& values, double* norm) {
  std::vector<std::pair<int64_t, double>> sums;
  bool good = true;
  for (const c10::IValue& value : values) {
    const auto items = value.toTupleRef().elements().vec();
    good = good && !items.at(0).toBool();
    for (size_t i = 1; i < items.size(); ++i) {
      const auto pair = items[i].toTupleRef().elements().vec();
      sums.emplace_back(pair.at(0).toInt(), pair.at(1).toDouble());
    }
  }
  std::sort(sums.begin(), sums.end());
  double total = 0;
  for (const auto& entry : sums) {
    total += entry.second;
  }
  *norm = std::sqrt(total);
  return good;
}

} // namespace

OptimResult PipelineRunner::Impl::optimize(
    torch::optim::Optimizer& optimizer,
    const std::optional<double>& max_norm) {
  check_usable(/*training=*/false);
  return alone<OptimResult>(/*training=*/false, [&] {
    ++calls_;
    if (transport_) {
      transport_->begin(calls_, /*evaluation=*/false);
    }
    OptimResult result;
    RankReport own;
    try {
      result = step_together(optimizer, max_norm);
    } catch (const LinksLost&) {
      throw;
    } catch (const ReplicaLost&) {
      throw;
    } catch (const Interrupted&) {
      throw;
    } catch (const std::exception& error) {
      own.failure.emplace(
          Failure{
              rank_, first_stage(), 0, "OPTIM", type_of(error), text_of(error)},
          -1);
    }
    std::optional<double> total;
    raise_failures(exchange_reports(own), replicas_.get(), &total);
    return result;
  });
}

OptimResult PipelineRunner::Impl::step_together(
    torch::optim::Optimizer& optimizer,
    const std::optional<double>& max_norm) {
  if (!max_norm) {
    optimizer.step();
    return {};
  }
  Found found;
  std::exception_ptr problem;
  try {
    found.squares = gradients_->squares(stages_);
  } catch (const std::exception&) {
    found = {true, {}};
    problem = std::current_exception();
  }
  double norm = 0;
  bool stop = !norm_of(
      exchange(transport_.get(), rank_, ranks_, value_of(found), &interrupts_),
      &norm);
  bool skip = !std::isfinite(norm);
  if (replicas_) {
    // Replicas hold equal gradients, but may have failed.
    const auto word = replicas_->maximum(
        {stop ? 1.0 : 0.0, skip ? 1.0 : 0.0, skip ? 0.0 : norm});
    stop = word.at(0) > 0;
    skip = word.at(1) > 0;
    norm = skip ? norm : word.at(2);
  }
  if (problem) {
    std::rethrow_exception(problem);
  }
  if (stop) {
    throw PeerFailedError("the optimizer of another rank failed");
  }
  // As torch.nn.utils.clip_grad_norm_ does.
  const double factor = *max_norm / (norm + 1e-6);
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : gradients_->parameters()) {
    if (!skip && factor < 1 && parameter.grad().defined()) {
      parameter.mutable_grad().mul_(factor);
    }
  }
  if (!skip) {
    optimizer.step();
  }
  return {!skip, norm};
}

} // namespace torch_sm3::pipeline
