// SPDX-License-Identifier: Apache-2.0
#include <cuda_on_host.h>

#include <adasum_coefficients_kernel.cuh>

#include <adasum_compute.h>
#include <adasum_vhdd_math.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace torch_sm3::distributed {
namespace {

at::Tensor leaves(int64_t p, int64_t n = 60) {
  return at::randn({p, n}, at::kDouble);
}

// [1, p, p]
at::Tensor gram_of(const at::Tensor& stack) {
  return at::matmul(stack, stack.t()).unsqueeze(0).contiguous();
}

double norm(const at::Tensor& x) {
  return x.norm().item<double>();
}

// Some layers of every kind: plain, with zeros, cancelling, not finite.
at::Tensor many_grams(int64_t p) {
  std::vector<at::Tensor> grams;
  at::Tensor zeros = leaves(p);
  zeros[p - 1].zero_();
  at::Tensor opposite = leaves(p);
  opposite[p - 1] = -opposite[0];
  at::Tensor bad = leaves(p);
  bad[0][1] = std::numeric_limits<double>::infinity();
  for (const at::Tensor& stack :
       {leaves(p), zeros, opposite, bad, at::zeros_like(bad)}) {
    grams.push_back(gram_of(stack));
  }
  return at::cat(grams);
}

Coefficients on_host(
    const at::Tensor& gram,
    const Rule& rule,
    const at::Tensor& means,
    const at::Tensor& shifts,
    const at::Tensor& states) {
  const int64_t layers = gram.size(0);
  const int64_t p = gram.size(1);
  const auto nodes = static_cast<int64_t>(rule.nodes.size());
  Coefficients result{
      at::zeros({layers, p}, at::kDouble),
      at::zeros({layers, 2}, at::kDouble),
      at::zeros({layers, 3}, at::kDouble)};
  std::vector<double> numbers(layers * layer_scratch(p, nodes));
  std::vector<int32_t> integers(layers * layer_integers(p, nodes));
  const LayerTable table{
      {p,
       rule.mode,
       rule.scale,
       rule.weights.empty() ? nullptr : rule.weights.data(),
       rule.nodes.empty() ? nullptr : rule.nodes.data(),
       nodes,
       rule.inner},
      layers,
      gram.const_data_ptr<double>(),
      shifts.defined() ? shifts.const_data_ptr<int32_t>() : nullptr,
      states.defined()
          ? reinterpret_cast<const NodeState*>(states.const_data_ptr<double>())
          : nullptr,
      means.defined() ? means.const_data_ptr<bool>() : nullptr,
      numbers.data(),
      integers.data(),
      result.values.mutable_data_ptr<double>(),
      result.report.mutable_data_ptr<double>(),
      reinterpret_cast<NodeState*>(result.roots.mutable_data_ptr<double>())};
  cuda_on_host::launch(1, cuda::kCoefficientThreads, cuda::coefficients, table);
  return result;
}

// at::equal takes NaN for different.
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(
      a.contiguous().view(at::kLong), b.contiguous().view(at::kLong));
}

void expect_same(const Coefficients& a, const Coefficients& b) {
  EXPECT_TRUE(same_bits(a.values, b.values));
  EXPECT_TRUE(same_bits(a.report, b.report));
  EXPECT_TRUE(same_bits(a.roots, b.roots));
}

TEST(AdasumCoefficients, OnTheDeviceHaveTheBitsOfTheCpu) {
  at::Tensor means = at::zeros({5}, at::kBool);
  means[0] = true;
  for (const int64_t p : {1, 2, 5, 8}) {
    const at::Tensor gram = many_grams(p);
    const at::Tensor shifts = at::full({5, p}, 3, at::kInt);
    Rule rule;
    rule.scale = 0.5;
    for (const Mode mode : {Mode::tree, Mode::psum, Mode::mean, Mode::sum}) {
      rule.mode = mode;
      for (const bool weighed : {false, true}) {
        rule.weights =
            weighed ? std::vector<double>(p, 1.5) : std::vector<double>();
        for (const Inner inner : {Inner::mean, Inner::adasum}) {
          for (const auto& nodes :
               {std::vector<int64_t>{},
                std::vector<int64_t>{p},
                std::vector<int64_t>{1, p - 1}}) {
            if ((inner == Inner::adasum && mode == Mode::psum) ||
                (nodes.size() == 2 && p == 1)) {
              continue;
            }
            rule.inner = inner;
            rule.nodes = nodes;
            expect_same(
                on_host(gram, rule, means, shifts, {}),
                coefficients_of_layers(gram, rule, means, shifts));
          }
        }
      }
    }
  }
}

TEST(AdasumCoefficients, OfScaledLeavesAreScaled) {
  const at::Tensor stack = leaves(5);
  const at::Tensor shifts =
      at::tensor({3, -2, 0, 7, std::numeric_limits<int32_t>::min()}, at::kInt)
          .unsqueeze(0);
  const at::Tensor factors = at::tensor({8.0, 0.25, 1.0, 128.0, 1.0});
  const at::Tensor scaled = stack / factors.to(at::kDouble).unsqueeze(1);
  for (const auto& nodes :
       {std::vector<int64_t>{}, std::vector<int64_t>{2, 2, 1}}) {
    for (const Mode mode : {Mode::tree, Mode::psum, Mode::mean, Mode::sum}) {
      Rule rule;
      rule.mode = mode;
      rule.nodes = nodes;
      const at::Tensor plain =
          coefficients_of_layers(gram_of(stack), rule, {}, {}).values;
      const at::Tensor got =
          coefficients_of_layers(gram_of(scaled), rule, {}, shifts).values;
      EXPECT_LE(norm(got / factors - plain), 1e-13);
    }
  }
}

TEST(AdasumCoefficients, HandleNormsThatFloat64CannotHold) {
  // 2^800, 2^-800 and 2^790, orthogonal: nothing is projected.
  const at::Tensor gram =
      at::tensor({1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0}, at::kDouble)
          .view({1, 3, 3});
  const at::Tensor shifts = at::tensor({800, -800, 790}, at::kInt).view({1, 3});
  for (const Mode mode : {Mode::tree, Mode::psum}) {
    Rule rule;
    rule.mode = mode;
    const at::Tensor c =
        coefficients_of_layers(gram, rule, {}, shifts).values[0];
    EXPECT_EQ(c[0].item<double>(), std::ldexp(1.0, 800));
    EXPECT_EQ(c[1].item<double>(), std::ldexp(1.0, -800));
    EXPECT_EQ(c[2].item<double>(), std::ldexp(1.0, 790));
  }
}

TEST(AdasumCoefficients, ExcludedLayersGetTheMean) {
  const at::Tensor gram = at::cat({gram_of(leaves(3)), gram_of(leaves(3))});
  at::Tensor means = at::zeros({2}, at::kBool);
  means[1] = true;
  Rule rule;
  rule.weights = {1.0, 2.0, 1.0};
  rule.scale = 2.0;
  const at::Tensor c = coefficients_of_layers(gram, rule, means, {}).values;
  EXPECT_TRUE(
      at::equal(c[0], coefficients_of_layers(gram, rule, {}, {}).values[0]));
  EXPECT_TRUE(at::equal(c[1], at::tensor({0.5, 1.0, 0.5}, at::kDouble)));
}

TEST(AdasumCoefficients, ReportConditionAndCancelledNodes) {
  const auto report = [](const at::Tensor& stack, Mode mode) {
    Rule rule;
    rule.mode = mode;
    return coefficients_of_layers(gram_of(stack), rule, {}, {}).report[0];
  };
  const at::Tensor a = leaves(1)[0];
  const at::Tensor parallel = at::stack({a, 1.5 * a, 2 * a, a});
  EXPECT_NEAR(report(parallel, Mode::tree)[0].item<double>(), 1.0, 1e-12);
  // -1/2 a + 5/6 3a = 2a: more than twice as large subtracts the other.
  const at::Tensor apart = at::stack({a, 3 * a});
  EXPECT_NEAR(report(apart, Mode::tree)[0].item<double>(), 1.5, 1e-12);
  const at::Tensor unit = at::zeros({9, 9}, at::kDouble).fill_diagonal_(2.0);
  EXPECT_NEAR(report(unit, Mode::tree)[0].item<double>(), 3.0, 1e-12);
  EXPECT_NEAR(report(unit, Mode::psum)[0].item<double>(), 10.0, 1e-12);
  EXPECT_EQ(report(unit, Mode::tree)[1].item<double>(), 0.0);
  const at::Tensor b = leaves(1)[0];
  const at::Tensor twice = at::stack({a, -a, b, -b, a});
  EXPECT_EQ(report(twice, Mode::tree)[1].item<double>(), 2.0);
  const at::Tensor near = at::stack({a, -a + 1e-3 * b});
  EXPECT_GT(report(near, Mode::tree)[0].item<double>(), 1e2);
  EXPECT_EQ(report(at::zeros_like(unit), Mode::tree)[0].item<double>(), 1.0);
}

// The tree of 8 ranks in two stages of runs of `q` ranks.
at::Tensor in_two_stages(const at::Tensor& stack, int64_t q) {
  const Rule rule;
  std::vector<at::Tensor> vectors, roots;
  for (int64_t first = 0; first < stack.size(0); first += q) {
    const at::Tensor run = stack.narrow(0, first, q);
    const Coefficients c = coefficients_of_layers(gram_of(run), rule, {}, {});
    vectors.push_back(at::matmul(c.values[0], run));
    roots.push_back(c.roots);
  }
  const at::Tensor nodes = at::stack(vectors);
  const at::Tensor states = at::stack(roots, 1).contiguous();
  const Coefficients c =
      coefficients_of_layers(gram_of(nodes), rule, {}, {}, states);
  return at::matmul(c.values[0], nodes);
}

at::Tensor in_one_stage(const at::Tensor& stack) {
  const Coefficients c = coefficients_of_layers(gram_of(stack), {}, {}, {});
  return at::matmul(c.values[0], stack);
}

TEST(AdasumCoefficients, OfTwoStagesAreThoseOfTheTree) {
  at::Tensor zeros = leaves(8);
  zeros[2].zero_();
  zeros[4].zero_();
  zeros[5].zero_();
  at::Tensor cancelling = leaves(8);
  cancelling[1] = -cancelling[0];
  at::Tensor all = cancelling.clone();
  all[3] = -all[2];
  for (const at::Tensor& stack : {leaves(8), zeros, cancelling, all}) {
    for (const int64_t q : {1, 2, 4, 8}) {
      const at::Tensor want = in_one_stage(stack);
      EXPECT_LE(norm(in_two_stages(stack, q) - want), 1e-13 * norm(want));
    }
  }
}

TEST(AdasumCoefficients, OfALaterStageGuardAgainstEarlierCancellation) {
  // What is left of an earlier stage is noise of leaves of norm 1.
  const at::Tensor gram =
      at::tensor({1e-30, 0.0, 0.0, 1.0}, at::kDouble).view({1, 2, 2});
  const at::Tensor states =
      at::tensor({2.0, 2.0, 2.0, 1.0, 1.0, 1.0}, at::kDouble).view({1, 2, 3});
  const Coefficients c = coefficients_of_layers(gram, {}, {}, {}, states);
  EXPECT_EQ(c.values[0][0].item<double>(), 0.0);
  EXPECT_EQ(c.values[0][1].item<double>(), 1.0);
}

struct Held {
  at::Tensor vector;
  double weight, spread;
  int32_t exponent;
};

// The tree of 2^k vectors by the pair rule on their inner products alone.
Held by_pairs(const std::vector<Held>& nodes, int* cancelled) {
  if (nodes.size() == 1) {
    return nodes[0];
  }
  const auto middle = nodes.begin() + static_cast<int64_t>(nodes.size() / 2);
  const Held a = by_pairs({nodes.begin(), middle}, cancelled);
  const Held b = by_pairs({middle, nodes.end()}, cancelled);
  const auto dot = [](const at::Tensor& x, const at::Tensor& y) {
    return x.dot(y).item<double>();
  };
  const PairResult r = adasum_node_pair(
      {dot(a.vector, b.vector),
       dot(a.vector, a.vector),
       dot(b.vector, b.vector),
       a.weight,
       b.weight,
       a.spread,
       b.spread,
       a.exponent,
       b.exponent},
      8.0);
  *cancelled += r.cancelled ? 1 : 0;
  return {
      r.factor_a * a.vector + r.factor_b * b.vector,
      r.weight,
      r.spread,
      r.exponent};
}

std::vector<Held> held(const at::Tensor& stack) {
  std::vector<Held> nodes;
  for (const at::Tensor& leaf : stack.unbind(0)) {
    const double size = norm(leaf);
    nodes.push_back({leaf, size > 0.0 ? 1.0 : 0.0, size, 0});
  }
  return nodes;
}

TEST(AdasumNodePair, MakesTheTree) {
  at::Tensor zeros = leaves(8);
  zeros[0].zero_();
  zeros[4].zero_();
  zeros[5].zero_();
  at::Tensor cancelling = leaves(8);
  cancelling[1] = -cancelling[0];
  int cancelled = 0;
  for (const at::Tensor& stack : {leaves(8), zeros, cancelling}) {
    const Held root = by_pairs(held(stack), &cancelled);
    const at::Tensor want = in_one_stage(stack);
    EXPECT_LE(norm(root.vector - want), 1e-13 * norm(want));
  }
  EXPECT_EQ(cancelled, 1);
}

TEST(AdasumNodePair, CombinesScaledVectors) {
  const at::Tensor stack = leaves(4);
  const at::Tensor want = in_one_stage(stack);
  std::vector<Held> nodes = held(stack);
  // 2^900 times the leaves, each held as another power of two.
  for (int32_t i = 0; i < 4; ++i) {
    nodes[i].vector = std::ldexp(1.0, -i) * nodes[i].vector;
    nodes[i].spread = std::ldexp(nodes[i].spread, 900);
    nodes[i].exponent = 900 + i;
  }
  int cancelled = 0;
  const Held root = by_pairs(nodes, &cancelled);
  const at::Tensor result = std::ldexp(1.0, root.exponent - 900) * root.vector;
  EXPECT_LE(norm(result - want), 1e-13 * norm(want));
  EXPECT_EQ(cancelled, 0);
  EXPECT_GT(root.spread, norm(want) * std::ldexp(1.0, 899));
}

TEST(AdasumNodePair, LeavesOutAbsentNodesAndSpreadsNan) {
  const PairResult one = adasum_node_pair({0, 0, 4, 0, 3, 0, 2, 5, -700}, 8.0);
  EXPECT_EQ(one.factor_b, 1.0);
  EXPECT_EQ(one.weight, 3.0);
  EXPECT_EQ(one.spread, 2.0);
  EXPECT_EQ(one.exponent, -700);
  const PairResult none = adasum_node_pair({0, 0, 0, 0, 0, 0, 0, 0, 0}, 8.0);
  EXPECT_EQ(none.weight, 0.0);
  EXPECT_FALSE(none.cancelled);
  const PairResult bad =
      adasum_node_pair({NAN, NAN, 4, 1, 1, NAN, 2, 0, 0}, 8.0);
  EXPECT_TRUE(std::isnan(bad.factor_a) && std::isnan(bad.factor_b));
}

} // namespace
} // namespace torch_sm3::distributed
