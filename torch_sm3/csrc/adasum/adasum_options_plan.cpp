// SPDX-License-Identifier: Apache-2.0
#include "adasum_options_plan.h"

#include "adasum_names.h"

#include <utility>

namespace torch_sm3::distributed {
namespace {

// torch's own names of dtypes are those of its C++ types.
const char* name_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Double:
      return "float64";
    case c10::ScalarType::Float:
      return "float32";
    case c10::ScalarType::Half:
      return "float16";
    case c10::ScalarType::BFloat16:
      return "bfloat16";
    default:
      return c10::toString(dtype);
  }
}

} // namespace

std::shared_ptr<const Plan> plan_of(
    const AdasumOptions& options,
    std::vector<int64_t> sizes,
    const char* op,
    std::vector<bool> means) {
  Plan plan(Layout(std::move(sizes)));
  plan.rule.mode = options.mode;
  plan.rule.scale = options.scale;
  plan.rule.node_size = options.node_size;
  plan.rule.inner = options.inner;
  plan.means = std::move(means);
  plan.algorithm = options.algorithm;
  plan.accumulate = parse_accumulate(name_of(options.accumulate_dtype), op);
  plan.wire =
      parse_wire(options.wire_dtype ? name_of(*options.wire_dtype) : "", op);
  plan.scratch_bytes = options.scratch_bytes;
  plan.threads = options.threads;
  check_plan(plan, op);
  return std::make_shared<const Plan>(std::move(plan));
}

} // namespace torch_sm3::distributed
