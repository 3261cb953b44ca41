// SPDX-License-Identifier: Apache-2.0
#include "adasum_states.h"

#include "adasum_tree_math.h"
#include "adasum_upload.h"

#include <ATen/ops/logical_or.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

namespace torch_sm3::distributed {
namespace {

// |g_i| from the squares of 2^-shift_i g_i, [layers, p].
at::Tensor norms_of(const at::Tensor& gram, const at::Tensor& shifts) {
  const at::Tensor norms = gram.diagonal(0, 1, 2).sqrt();
  return shifts.defined() ? norms.mul(at::pow(2.0, shifts.to(at::kDouble)))
                          : norms;
}

bool projects(const Rule& rule) {
  return rule.mode == Mode::tree || rule.mode == Mode::psum;
}

} // namespace

at::Tensor states_with_means(
    const at::Tensor& found,
    const at::Tensor& gram,
    const Rule& rule,
    const at::Tensor& means,
    const at::Tensor& shifts) {
  if (projects(rule) && !means.defined()) {
    return found;
  }
  const at::Tensor weights = rule.weights.empty()
                                 ? at::ones({gram.size(1)}, gram.options())
                                 : to_device(rule.weights, gram.device());
  const at::Tensor total = weights.sum();
  const at::Tensor norms = norms_of(gram, shifts);
  const at::Tensor states = at::stack(
      {total.expand({gram.size(0)}),
       norms.mul(weights).sum(1).div(total),
       norms.gt(0).sum(1).to(at::kDouble)},
      1);
  return projects(rule) ? at::where(means.unsqueeze(1), states, found) : states;
}

at::Tensor resolved_states(
    const at::Tensor& states,
    const at::Tensor& gram,
    const Rule& rule,
    const at::Tensor& means,
    const at::Tensor& shifts) {
  if (!projects(rule)) {
    return states;
  }
  const at::Tensor spread = states.select(2, 1);
  const at::Tensor active = states.select(2, 2).sum(1, /*keepdim=*/true);
  const at::Tensor bound =
      active.mul(8.0 * detail::kEpsilon).sqrt().mul(spread);
  // Also true for NaN, which spoils the layer later.
  at::Tensor kept = norms_of(gram, shifts).le(bound).logical_not();
  if (means.defined()) {
    kept = at::logical_or(kept, means.unsqueeze(1));
  }
  const at::Tensor result = states.clone();
  result.select(2, 0).mul_(kept.to(states.scalar_type()));
  return result;
}

} // namespace torch_sm3::distributed
