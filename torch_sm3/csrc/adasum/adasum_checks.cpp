// SPDX-License-Identifier: Apache-2.0
#include "adasum_ops.h"
#include "scalar_kind.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <cmath>
#include <string_view>

namespace torch_sm3::distributed {
namespace {

template <class Expected, class Got>
std::string message(
    const char* op,
    const Expected& expected,
    const Got& got,
    const char* argument) {
  return c10::str(
      op,
      ": expected ",
      expected,
      ", but got ",
      got,
      " (argument '",
      argument,
      "')");
}

} // namespace

ScalarKind
scalar_kind(c10::ScalarType dtype, const char* op, const char* argument) {
  TORCH_CHECK_TYPE(
      has_scalar_kind(dtype),
      message(
          op,
          "a tensor of float16, bfloat16, float32 or float64",
          c10::toString(dtype),
          argument));
  return torch_sm3::scalar_kind(dtype);
}

void check_leaf_dtype(
    c10::ScalarType dtype,
    const char* op,
    const char* argument) {
  TORCH_CHECK_TYPE(
      has_scalar_kind(c10::toRealValueType(dtype)) &&
          dtype != c10::ScalarType::ComplexHalf,
      message(
          op,
          "a tensor of float16, bfloat16, float32, float64, complex64 or "
          "complex128",
          c10::toString(dtype),
          argument));
}

Accumulate
parse_accumulate(std::optional<c10::ScalarType> dtype, const char* op) {
  const c10::ScalarType type = dtype.value_or(c10::ScalarType::Double);
  TORCH_CHECK_TYPE(
      type == c10::ScalarType::Double || type == c10::ScalarType::Float,
      message(
          op, "float64 or float32", c10::toString(type), "accumulate_dtype"));
  return type == c10::ScalarType::Float ? Accumulate::kFloat32
                                        : Accumulate::kFloat64;
}

c10::ScalarType
result_dtype(const at::Tensor& stack, std::optional<c10::ScalarType> dtype) {
  constexpr const char* op = "adasum_combine";
  const c10::ScalarType type = dtype.value_or(stack.scalar_type());
  check_leaf_dtype(type, op, "dtype");
  TORCH_CHECK_TYPE(
      c10::isComplexType(type) == stack.is_complex(),
      message(
          op,
          stack.is_complex() ? "a complex dtype" : "a real dtype",
          c10::toString(type),
          "dtype"));
  return type;
}

Mode parse_mode(std::string_view mode, const char* op) {
  if (mode == "tree") {
    return Mode::tree;
  }
  if (mode == "psum") {
    return Mode::psum;
  }
  if (mode == "mean") {
    return Mode::mean;
  }
  TORCH_CHECK_VALUE(
      mode == "sum",
      message(
          op,
          "'tree', 'psum', 'mean' or 'sum'",
          c10::str("'", mode, "'"),
          "mode"));
  return Mode::sum;
}

Inner parse_inner(std::string_view inner, const char* op) {
  if (inner == "mean") {
    return Inner::mean;
  }
  TORCH_CHECK_VALUE(
      inner == "adasum",
      message(op, "'mean' or 'adasum'", c10::str("'", inner, "'"), "inner"));
  return Inner::adasum;
}

void check_inner(Mode mode, Inner inner, const char* op) {
  TORCH_CHECK_VALUE(
      mode != Mode::psum || inner == Inner::mean,
      message(op, "'mean' for mode 'psum'", "'adasum'", "inner"));
}

void check_scale(double scale, const char* op) {
  TORCH_CHECK_VALUE(
      std::isfinite(scale), message(op, "a finite number", scale, "scale"));
}

void check_sizes(c10::IntArrayRef sizes, int64_t numel, const char* op) {
  int64_t sum = 0;
  for (const int64_t size : sizes) {
    TORCH_CHECK_VALUE(
        size >= 0, message(op, "layer sizes >= 0", size, "sizes"));
    sum += size;
  }
  TORCH_CHECK_VALUE(
      sum == numel,
      message(
          op,
          c10::str("layer sizes that sum to ", numel),
          c10::str("a sum of ", sum),
          "sizes"));
}

void check_pair(
    const at::Tensor& a,
    const at::Tensor& b,
    double weight_a,
    double weight_b) {
  constexpr const char* op = "adasum_pair";
  TORCH_CHECK_VALUE(
      a.scalar_type() == b.scalar_type(),
      message(
          op,
          c10::str("dtype ", c10::toString(a.scalar_type())),
          c10::toString(b.scalar_type()),
          "b"));
  TORCH_CHECK_VALUE(
      a.device() == b.device(),
      message(op, c10::str("device ", a.device()), b.device(), "b"));
  TORCH_CHECK_VALUE(
      weight_a >= 0 && std::isfinite(weight_a),
      message(op, "a finite weight >= 0", weight_a, "weight_a"));
  TORCH_CHECK_VALUE(
      weight_b >= 0 && std::isfinite(weight_b),
      message(op, "a finite weight >= 0", weight_b, "weight_b"));
  check_leaf_dtype(a.scalar_type(), op, "a");
}

void check_same_shape(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK_VALUE(
      a.sizes() == b.sizes(),
      message("adasum_pair", c10::str("shape ", a.sizes()), b.sizes(), "b"));
}

void check_stack(const at::Tensor& stack, const char* op) {
  TORCH_CHECK_VALUE(
      stack.dim() == 2 && stack.sym_size(0) >= 1,
      message(
          op,
          "a tensor [p, N] with p >= 1",
          c10::str("shape ", stack.sym_sizes()),
          "stack"));
  check_leaf_dtype(stack.scalar_type(), op, "stack");
}

void check_gram(const at::Tensor& gram) {
  constexpr const char* op = "adasum_coefficients";
  TORCH_CHECK_VALUE(
      gram.dim() == 3 && gram.sym_size(1) == gram.sym_size(2) &&
          gram.sym_size(1) >= 1,
      message(
          op,
          "a tensor [L, p, p] with p >= 1",
          c10::str("shape ", gram.sym_sizes()),
          "gram"));
  TORCH_CHECK_TYPE(
      gram.scalar_type() == c10::ScalarType::Double,
      message(op, "float64", c10::toString(gram.scalar_type()), "gram"));
}

void check_weights(const std::vector<double>& weights, const char* op) {
  double sum = 0.0;
  for (const double weight : weights) {
    TORCH_CHECK_VALUE(
        weight >= 0 && std::isfinite(weight),
        message(op, "finite weights >= 0", weight, "weights"));
    sum += weight;
  }
  TORCH_CHECK_VALUE(
      weights.empty() || (sum > 0 && std::isfinite(sum)),
      message(op, "weights of a finite sum > 0", sum, "weights"));
}

void check_weights(const at::Tensor& weights, const c10::SymInt& p) {
  constexpr const char* op = "adasum_coefficients";
  TORCH_CHECK_VALUE(
      weights.dim() == 1 && weights.sym_size(0) == p,
      message(op, c10::str("shape [", p, "]"), weights.sym_sizes(), "weights"));
  TORCH_CHECK_TYPE(
      at::isFloatingType(weights.scalar_type()),
      message(
          op,
          "a floating-point tensor",
          c10::toString(weights.scalar_type()),
          "weights"));
}

Rule parse_rule(
    const at::Tensor& gram,
    std::string_view mode,
    c10::OptionalArrayRef<int64_t> nodes,
    std::string_view inner,
    double scale) {
  constexpr const char* op = "adasum_coefficients";
  check_gram(gram);
  check_scale(scale, op);
  Rule rule;
  rule.mode = parse_mode(mode, op);
  rule.inner = parse_inner(inner, op);
  check_inner(rule.mode, rule.inner, op);
  rule.scale = scale;
  if (nodes.has_value()) {
    rule.nodes = nodes->vec();
    int64_t sum = 0;
    for (const int64_t ranks : rule.nodes) {
      TORCH_CHECK_VALUE(
          ranks >= 1, message(op, "nodes of >= 1 rank", ranks, "nodes"));
      sum += ranks;
    }
    TORCH_CHECK_VALUE(
        gram.sym_size(1) == sum,
        message(
            op,
            c10::str("nodes that sum to ", gram.sym_size(1)),
            c10::str("a sum of ", sum),
            "nodes"));
  }
  return rule;
}

void check_combine(
    const at::Tensor& stack,
    const at::Tensor& coefficients,
    c10::IntArrayRef sizes) {
  constexpr const char* op = "adasum_combine";
  check_stack(stack, op);
  check_sizes(sizes, stack.size(1), op);
  TORCH_CHECK_VALUE(
      coefficients.dim() == 2 &&
          coefficients.size(0) == static_cast<int64_t>(sizes.size()) &&
          coefficients.size(1) == stack.size(0),
      message(
          op,
          c10::str("shape [", sizes.size(), ", ", stack.size(0), "]"),
          coefficients.sizes(),
          "coefficients"));
  TORCH_CHECK_TYPE(
      coefficients.scalar_type() == c10::ScalarType::Double,
      message(
          op,
          "float64",
          c10::toString(coefficients.scalar_type()),
          "coefficients"));
  TORCH_CHECK_VALUE(
      coefficients.device() == stack.device(),
      message(
          op,
          c10::str("device ", stack.device()),
          coefficients.device(),
          "coefficients"));
}

} // namespace torch_sm3::distributed
