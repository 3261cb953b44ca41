// SPDX-License-Identifier: Apache-2.0
#include <search/costs.h>

#include <algorithm>

namespace torch_sm3::pipeline {
namespace {

// One of `parts` equal stages. What passes its border, and what an action needs
// while it runs, stays what it is.
StageCosts share(StageCosts whole, double parts) {
  for (double* cost :
       {&whole.forward,
        &whole.input,
        &whole.weight,
        &whole.recompute,
        &whole.reduce,
        &whole.optimizer,
        &whole.activation_bytes,
        &whole.released_at_input,
        &whole.static_bytes}) {
    *cost /= parts;
  }
  whole.shared_bytes = std::min(whole.shared_bytes, whole.activation_bytes);
  for (std::optional<double>* cost : {&whole.backward, &whole.pair}) {
    if (*cost) {
      **cost /= parts;
    }
  }
  return whole;
}

// Two neighbouring stages as one.
StageCosts together(const StageCosts& a, const StageCosts& b) {
  StageCosts sum = b;
  sum.forward += a.forward;
  sum.input += a.input;
  sum.weight += a.weight;
  sum.recompute += a.recompute;
  sum.reduce += a.reduce;
  sum.optimizer += a.optimizer;
  sum.activation_bytes += a.activation_bytes;
  sum.released_at_input += a.released_at_input;
  sum.static_bytes += a.static_bytes;
  sum.transient_bytes = std::max(a.transient_bytes, b.transient_bytes);
  sum.backward.reset();
  if (a.backward || b.backward) {
    sum.backward = a.full_backward() + b.full_backward();
  }
  sum.pair.reset();
  if (a.pair && b.pair) {
    sum.pair = *a.pair + *b.pair;
  }
  return sum;
}

} // namespace

std::optional<Costs>
regroup(const Costs& costs, uint32_t ranks, uint32_t chunks) {
  Costs out = costs;
  if (costs.stages.size() == 1) {
    out.stages = {share(costs.stages[0], chunks)};
    return out;
  }
  const size_t wanted = size_t{ranks} * chunks;
  const size_t given = costs.stages.size();
  if (given % wanted != 0) {
    return std::nullopt;
  }
  out.stages.clear();
  for (size_t first = 0; first < given; first += given / wanted) {
    StageCosts sum = costs.stages[first];
    for (size_t s = first + 1; s < first + given / wanted; ++s) {
      sum = together(sum, costs.stages[s]);
    }
    out.stages.push_back(sum);
  }
  return out;
}

} // namespace torch_sm3::pipeline
