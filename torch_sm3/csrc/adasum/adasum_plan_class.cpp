// SPDX-License-Identifier: Apache-2.0
#include "adasum_plan_class.h"

#include "adasum_names.h"
#include "adasum_ops.h"

#include <torch/custom_class.h>

#include <utility>

namespace torch_sm3::distributed {
namespace {

constexpr const char* kOp = "AdasumState";

c10::intrusive_ptr<PlanHolder> make_plan(
    std::vector<int64_t> sizes,
    const std::string& mode,
    double scale,
    const std::string& algorithm,
    int64_t node_size,
    const std::string& inner,
    const c10::List<bool>& means,
    std::vector<double> weights,
    const std::string& accumulate,
    const std::string& wire,
    bool wide_result,
    int64_t scratch_bytes,
    int64_t threads,
    std::vector<std::string> names) {
  Plan plan(Layout(std::move(sizes)));
  plan.rule.mode = parse_mode(mode, kOp);
  plan.rule.scale = scale;
  plan.rule.weights = std::move(weights);
  plan.rule.node_size = node_size;
  plan.rule.inner = parse_inner(inner, kOp);
  plan.means.assign(means.begin(), means.end());
  plan.algorithm = parse_algorithm(algorithm, kOp);
  plan.accumulate = parse_accumulate(accumulate, kOp);
  plan.wire = parse_wire(wire, kOp);
  plan.wide_result = wide_result;
  plan.scratch_bytes = scratch_bytes;
  plan.threads = static_cast<int>(threads);
  plan.names = std::move(names);
  check_plan(plan, kOp);
  auto holder = c10::make_intrusive<PlanHolder>();
  holder->layers = plan.layers_in_words();
  holder->plan = std::make_shared<const Plan>(std::move(plan));
  return holder;
}

} // namespace

void register_plan(torch::Library& m) {
  m.class_<PlanHolder>("AdasumPlan").def(torch::init(&make_plan));
}

} // namespace torch_sm3::distributed
