// SPDX-License-Identifier: Apache-2.0
#include "adasum_plan.h"

#include "adasum_ops.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace torch_sm3::distributed {
namespace {

constexpr int64_t kLeastScratch = int64_t{1} << 20;
// Names in an error message; more would bury what went wrong.
constexpr int64_t kNamed = 3;

} // namespace

std::string Plan::name_of(int64_t layer) const {
  return names.empty() ? c10::str(layer) : c10::str("'", names[layer], "'");
}

std::string Plan::layers_in_words() const {
  const int64_t layers = layout.layers();
  if (names.empty() || layers == 0) {
    return c10::str(" of ", layers, layers == 1 ? " layer" : " layers");
  }
  std::string text = " of " + name_of(0);
  for (int64_t layer = 1; layer < std::min(layers, kNamed); ++layer) {
    text += c10::str(layer + 1 < layers ? ", " : " and ", name_of(layer));
  }
  if (layers > kNamed) {
    text += c10::str(" and ", layers - kNamed, " more");
  }
  return text;
}

void check_plan(const Plan& plan, const char* op) {
  const auto expect = [op](
                          bool good,
                          const auto& expected,
                          const auto& got,
                          const char* argument) {
    TORCH_CHECK_VALUE(
        good,
        op,
        ": expected ",
        expected,
        ", but got ",
        got,
        " (argument '",
        argument,
        "')");
  };
  const int64_t layers = plan.layout.layers();
  for (const int64_t size : plan.layout.sizes()) {
    expect(size >= 0, "layer sizes >= 0", size, "sizes");
  }
  check_scale(plan.rule.scale, op);
  if (!plan.rule.weights.empty()) {
    check_weights(plan.rule.weights, op);
  }
  expect(
      plan.rule.node_size >= 0,
      "a number >= 1",
      plan.rule.node_size,
      "node_size");
  check_inner(plan.rule.mode, plan.rule.inner, op);
  const auto count = [&](size_t got, const char* argument) {
    expect(
        got == 0 || static_cast<int64_t>(got) == layers,
        c10::str("one value for each of ", layers, " layers"),
        got,
        argument);
  };
  count(plan.means.size(), "means");
  count(plan.names.size(), "names");
  expect(
      plan.scratch_bytes >= kLeastScratch,
      "at least 1 MiB",
      plan.scratch_bytes,
      "scratch_bytes");
  expect(plan.threads >= 0, "a number >= 0", plan.threads, "threads");
}

} // namespace torch_sm3::distributed
