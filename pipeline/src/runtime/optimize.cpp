// SPDX-License-Identifier: Apache-2.0
// The optimizer's step as one of the whole pipeline: norm, clip, skip.
#include <runtime/runner_impl.h>

#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>

namespace torch_sm3::pipeline {
namespace {

// What a rank was asked for and found in its gradients.
struct Found {
  RankReport report;
  std::optional<double> max_norm;
  std::vector<std::pair<int64_t, double>> squares; // by stage
};

c10::IValue value_of(const Found& found) {
  std::vector<c10::IValue> items{value_of(found.report), found.max_norm};
  for (const auto& [stage, sum] : found.squares) {
    items.push_back(c10::ivalue::Tuple::create({stage, sum}));
  }
  return c10::ivalue::Tuple::create(std::move(items));
}

Found read_found(const c10::IValue& value) {
  const auto items = value.toTupleRef().elements().vec();
  Found found{read_report(items.at(0)), items.at(1).toOptional<double>(), {}};
  for (size_t i = 2; i < items.size(); ++i) {
    const auto pair = items[i].toTupleRef().elements().vec();
    found.squares.emplace_back(pair.at(0).toInt(), pair.at(1).toDouble());
  }
  return found;
}

// Adds the sums of all stages in their order, so that the bits do not depend on
// the ranks.
double norm_of(const std::vector<Found>& all) {
  std::vector<std::pair<int64_t, double>> sums;
  for (const Found& found : all) {
    sums.insert(sums.end(), found.squares.begin(), found.squares.end());
  }
  std::sort(sums.begin(), sums.end());
  double total = 0;
  for (const auto& entry : sums) {
    total += entry.second;
  }
  return std::sqrt(total);
}

std::string in_words(const std::optional<double>& max_norm) {
  return max_norm ? c10::str(*max_norm) : "None";
}

// The failures of all ranks; that they were asked for different things is one,
// too.
std::vector<RankReport> reports_of(const std::vector<Found>& all) {
  std::vector<RankReport> reports;
  const std::optional<double> first = all.front().max_norm;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    reports.push_back(all[rank].report);
    const std::optional<double> own = all[rank].max_norm;
    if (own == first || reports.back().failure) {
      continue;
    }
    const std::string text = c10::str(
        "optimizer_step: expected max_norm ",
        in_words(first),
        " as on rank 0, but got ",
        in_words(own),
        " on rank ",
        rank,
        " (argument 'max_norm')");
    reports.back().failure.emplace(
        Failure{
            static_cast<int64_t>(rank), 0, 0, kArguments, "ValueError", text},
        -1);
  }
  return reports;
}

} // namespace

OptimResult PipelineRunner::Impl::optimize(
    torch::optim::Optimizer* optimizer,
    const std::optional<double>& max_norm) {
  check_usable(/*training=*/false);
  return alone<OptimResult>(/*training=*/false, [&] {
    ++calls_;
    if (transport_) {
      transport_->begin(calls_, /*evaluation=*/false);
    }
    Found own{{}, max_norm, {}};
    if (max_norm && !(*max_norm >= 0)) {
      const std::string text = c10::str(
          "optimizer_step: expected max_norm of at least 0, but got ",
          *max_norm,
          " (argument 'max_norm')");
      own.report.failure.emplace(
          Failure{rank_, first_stage(), 0, kArguments, "ValueError", text}, -1);
    } else {
      own.report = attempt([&] {
        if (max_norm) {
          own.squares = gradients_->squares(stages_);
        } else if (optimizer != nullptr) {
          optimizer->step();
        }
      });
    }
    std::vector<Found> all;
    for (const c10::IValue& value : exchange(
             transport_.get(), rank_, ranks_, value_of(own), &interrupts_)) {
      all.push_back(read_found(value));
    }
    std::optional<double> total;
    raise_failures(reports_of(all), replicas_.get(), &total);
    return max_norm ? clip(optimizer, *max_norm, norm_of(all)) : OptimResult();
  });
}

// What became of user code that is not an action of the schedule.
RankReport
PipelineRunner::Impl::attempt(const std::function<void()>& act) const {
  RankReport report;
  try {
    act();
  } catch (const std::exception& error) {
    report.failure.emplace(
        Failure{
            rank_, first_stage(), 0, "OPTIM", type_of(error), text_of(error)},
        -1);
  }
  return report;
}

// Scales the gradients of all stages down together and steps, if there is an
// optimizer; leaves both out where the norm is not finite.
OptimResult PipelineRunner::Impl::clip(
    torch::optim::Optimizer* optimizer,
    double max_norm,
    double norm) {
  bool skip = !std::isfinite(norm);
  if (replicas_) {
    // Replicas hold equal gradients, unless they keep their own.
    const auto word = replicas_->maximum({skip ? 1.0 : 0.0, skip ? 0.0 : norm});
    skip = word.at(0) > 0;
    norm = skip ? norm : word.at(1);
  }
  // As torch.nn.utils.clip_grad_norm_ does.
  const double factor = max_norm / (norm + 1e-6);
  const RankReport own = attempt([&] {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : gradients_->parameters()) {
      if (!skip && factor < 1 && parameter.grad().defined()) {
        parameter.mutable_grad().mul_(factor);
      }
    }
    if (!skip && optimizer != nullptr) {
      const at::AutoGradMode grad(true);
      optimizer->step();
    }
  });
  std::optional<double> total;
  raise_failures(exchange_reports(own), replicas_.get(), &total);
  return {!skip, norm};
}

} // namespace torch_sm3::pipeline
