// SPDX-License-Identifier: Apache-2.0
// Searches that tests ask for.
#pragma once

#include <torch_sm3/pipeline/search.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace torch_sm3::pipeline {

inline StageCosts
stage(double forward, double input, double weight, double bytes) {
  StageCosts costs;
  costs.forward = forward;
  costs.input = input;
  costs.weight = weight;
  costs.activation_bytes = bytes;
  return costs;
}

inline PlanOptions automatic(
    int64_t ranks,
    int64_t microbatches,
    std::vector<StageCosts> stages,
    std::vector<double> limits = {}) {
  PlanOptions options{
      .kind = "auto", .ranks = ranks, .microbatches = microbatches};
  options.costs.emplace();
  options.costs->stages = std::move(stages);
  options.memory_limit = std::move(limits);
  return options;
}

inline const Candidate& chosen(const Choice& choice) {
  return *std::find_if(
      choice.alternatives.begin(),
      choice.alternatives.end(),
      [](const Candidate& candidate) { return candidate.chosen; });
}

inline double largest(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

// Costs of one stage of a rank whose whole share is known.
inline Costs part(Costs costs, int64_t chunks) {
  const double parts = static_cast<double>(chunks);
  StageCosts& of = costs.stages[0];
  of.forward /= parts;
  of.input /= parts;
  of.weight /= parts;
  of.activation_bytes /= parts;
  return costs;
}

} // namespace torch_sm3::pipeline
