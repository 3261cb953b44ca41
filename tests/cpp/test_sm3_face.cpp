// SPDX-License-Identifier: Apache-2.0
// What the C++ optimizer adds to the operators: state, signals, pieces.
#include <sm3_face_helpers.h>
#include <torch_sm3/sm3_ops.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <limits>

namespace torch_sm3::optim {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

at::Tensor
coo(const std::vector<int64_t>& rows,
    const at::Tensor& values,
    at::IntArrayRef shape) {
  return at::_sparse_coo_tensor_unsafe(
      at::tensor(rows).reshape({1, -1}), values, shape);
}

TEST(SM3Face, HasTheBitsOfTheOperator) {
  const auto params = leaves({{5, 7}, {7}, {2, 3, 4}, {}});
  const auto others = copies(params);
  SM3 optimizer(params, SM3Options(0.05).momentum(0.9).weight_decay(0.01));
  std::vector<at::Tensor> accumulators, buffers, steps, grads, details;
  for (const at::Tensor& other : others) {
    details.push_back(other.detach());
    for (const at::Tensor& numbers : sm3_accumulators(other)) {
      accumulators.push_back(numbers);
    }
    buffers.push_back(at::zeros(other.sizes()));
    steps.push_back(at::zeros({}, at::kLong));
  }
  for (uint64_t step = 0; step < 4; ++step) {
    set_grads(params, step);
    set_grads(others, step);
    optimizer.step();
    grads.clear();
    for (const at::Tensor& other : others) {
      grads.push_back(other.grad());
    }
    SM3UpdateOptions options;
    options.momentum = 0.9;
    options.weight_decay = 0.01;
    sm3_update_(
        details, grads, accumulators, buffers, {}, {}, steps, 0.05, options);
    expect_equal(params, others);
  }
  EXPECT_EQ(state_of(optimizer, params[3]).step().item<int64_t>(), 4);
}

TEST(SM3Face, StateComesForAllThatRequireAGradient) {
  const auto params = leaves({{3, 4}, {4}, {5}});
  params[2].set_requires_grad(false);
  SM3 optimizer(params, SM3Options());
  EXPECT_EQ(optimizer.state().size(), 3);
  EXPECT_FALSE(state_of(optimizer, params[0]).step().defined());
  set_grads({params[0]}, 1);
  optimizer.step();
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<int64_t>(), 1);
  EXPECT_EQ(state_of(optimizer, params[1]).step().item<int64_t>(), 0);
  EXPECT_EQ(state_of(optimizer, params[1]).accumulators().size(), 1);
  EXPECT_TRUE(state_of(optimizer, params[2]).accumulators().empty());
}

TEST(SM3Face, test_sm3_row_8_an_unfrozen_layer_starts_from_zero) {
  const auto params = leaves({{3, 4}, {3, 4}});
  params[1].set_requires_grad(false);
  SM3 optimizer(params, SM3Options());
  set_grads({params[0]}, 1);
  optimizer.step();
  params[1].set_requires_grad(true);
  set_grads(params, 2);
  const at::Tensor before = params[1].detach().clone();
  optimizer.step();
  EXPECT_EQ(state_of(optimizer, params[1]).step().item<int64_t>(), 1);
  // A first step has |u| = 1.
  EXPECT_TRUE((params[1].detach() - before)
                  .abs()
                  .allclose(at::full({3, 4}, 0.1), 1e-5, 1e-6));
}

TEST(SM3Face, test_sm3_row_9_all_that_is_not_empty_moves) {
  const auto params =
      leaves({{1}, {1}, {0}, {1}, {0}, {}, {0, 3}, {3, 0}, {1, 5, 1}});
  const auto before = copies(params);
  SM3 optimizer(params, SM3Options().momentum(0.5));
  set_grads(params, 1);
  optimizer.step();
  for (size_t p = 0; p < params.size(); ++p) {
    EXPECT_EQ(params[p].equal(before[p]), params[p].numel() == 0) << p;
    EXPECT_EQ(state_of(optimizer, params[p]).step().item<int64_t>(), 1) << p;
  }
}

TEST(SM3Face, test_sm3_row_11_duplicate_indices_are_added_then_squared) {
  const auto params = std::vector<at::Tensor>{leaf(at::zeros({4, 2}))};
  SM3 optimizer(params, SM3Options());
  params[0].mutable_grad() =
      coo({1, 1}, at::tensor({1.f, 0.f, 1.f, 0.f}).reshape({2, 2}), {4, 2});
  optimizer.step();
  const auto& state = state_of(optimizer, params[0]);
  EXPECT_TRUE(state.accumulators()[0].equal(at::tensor({0.f, 4.f, 0.f, 0.f})));
  EXPECT_EQ(params[0][1][0].item<float>(), -0.1f);
  EXPECT_EQ(params[0].grad()._nnz(), 2);
}

TEST(SM3Face, test_sm3_row_12_sparse_equals_densified) {
  const auto params = leaves({{6, 4}});
  const auto others = copies(params);
  SM3 sparse(params, SM3Options());
  SM3 dense(others, SM3Options());
  for (uint64_t step = 0; step < 4; ++step) {
    at::manual_seed(step);
    const at::Tensor grad = coo({1, 4}, at::randn({2, 4}), {6, 4});
    params[0].mutable_grad() = grad;
    others[0].mutable_grad() = grad.to_dense();
    sparse.step();
    dense.step();
    expect_equal(params, others);
    expect_equal(
        state_of(sparse, params[0]).accumulators(),
        state_of(dense, others[0]).accumulators());
  }
}

TEST(SM3Face, MomentumWaitsForADenseGradient) {
  const auto params = leaves({{6, 4}});
  SM3 optimizer(params, SM3Options().momentum(0.9));
  params[0].mutable_grad() = coo({1}, at::ones({1, 4}), {6, 4});
  optimizer.step();
  EXPECT_FALSE(state_of(optimizer, params[0]).momentum_buffer().defined());
  set_grads(params, 1);
  optimizer.step();
  EXPECT_TRUE(state_of(optimizer, params[0]).momentum_buffer().defined());
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<int64_t>(), 2);
}

TEST(SM3Face, SparseGradientsAreRefusedBeforeAnythingIsWritten) {
  const auto params = leaves({{6, 4}, {6, 4}});
  const auto before = copies(params);
  SM3 optimizer(params, SM3Options().weight_decay(0.1));
  set_grads(params, 1);
  params[1].mutable_grad() = coo({1}, at::ones({1, 4}), {6, 4});
  EXPECT_EQ(
      error_of([&] { optimizer.step(); }),
      "SM3: expected weight_decay 0 with a sparse gradient, but got 0.1 "
      "(argument 'weight_decay')");
  expect_equal(params, before);
}

TEST(SM3Face, Int8MomentumIsForLargeMatrices) {
  const auto params = leaves({{16, 300}, {300}, {16, 10}});
  SM3 optimizer(params, SM3Options().momentum(0.9).momentum_dtype(at::kChar));
  set_grads(params, 1);
  optimizer.step();
  const SM3ParamState& large = state_of(optimizer, params[0]);
  EXPECT_EQ(large.momentum_buffer().scalar_type(), at::kChar);
  EXPECT_EQ(large.momentum_scale().sizes(), at::IntArrayRef({16, 2}));
  for (const size_t small : {1, 2}) {
    const SM3ParamState& state = state_of(optimizer, params[small]);
    EXPECT_EQ(state.momentum_buffer().scalar_type(), at::kFloat);
    EXPECT_FALSE(state.momentum_scale().defined());
  }
}

TEST(SM3Face, GradScaleDividesOnce) {
  const auto params = leaves({{3, 4}});
  const auto others = copies(params);
  SM3 scaled(params, SM3Options());
  SM3 plain(others, SM3Options());
  set_grads(params, 1);
  set_grads(others, 1);
  params[0].mutable_grad().mul_(1024);
  scaled.set_grad_scale(at::scalar_tensor(1024.0));
  scaled.step();
  plain.step();
  expect_equal(params, others);
  scaled.set_grad_scale(std::nullopt);
  scaled.step();
  others[0].mutable_grad().mul_(1024);
  plain.step();
  expect_equal(params, others);
}

TEST(SM3Face, test_sm3_row_23_any_nonzero_found_inf_skips) {
  const auto params = leaves({{3, 4}, {4}});
  SM3 optimizer(
      groups_of(params, {SM3Options(0.2), SM3Options().momentum(0.9)}));
  set_grads(params, 1);
  const auto before = copies(params);
  for (const double found : {1.0, 2.0}) {
    optimizer.set_found_inf(at::scalar_tensor(found));
    optimizer.step();
  }
  expect_equal(params, before);
  EXPECT_EQ(optimizer.skipped_steps(), 2); // not once per group
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<int64_t>(), 0);
  optimizer.set_found_inf(at::zeros({1}));
  optimizer.step();
  EXPECT_EQ(optimizer.skipped_steps(), 2);
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<int64_t>(), 1);
}

TEST(SM3Face, SkipNonfiniteLooksAtAllGroups) {
  const auto params = leaves({{3, 4}, {6, 4}});
  SM3 optimizer(
      groups_of(params, {SM3Options(0.2), SM3Options(0.3)}),
      SM3Options().skip_nonfinite(true));
  const auto before = copies(params);
  set_grads(params, 1);
  params[1].mutable_grad() = coo({2}, at::full({1, 4}, kInf), {6, 4});
  optimizer.step();
  expect_equal(params, before);
  EXPECT_EQ(optimizer.skipped_steps(), 1);
  set_grads(params, 2);
  optimizer.step();
  EXPECT_FALSE(params[0].equal(before[0]));
  EXPECT_EQ(optimizer.skipped_steps(), 1);
  EXPECT_EQ(
      error_of<c10::ValueError>([&] {
        const auto more = leaves({{2}});
        SM3 other(params, SM3Options());
        other.add_param_group(
            groups_of(more, {SM3Options().skip_nonfinite(true)})[0]);
      }),
      "SM3: expected one value for all groups, but got a group with its own "
      "(argument 'skip_nonfinite')");
}

TEST(SM3Face, StateBytesArePredicted) {
  const auto weight = leaves({{11008, 4096}});
  SM3 linear(weight, SM3Options());
  EXPECT_EQ(linear.state_bytes(), 15104 * 4 + 8);
  const std::vector<std::vector<int64_t>> shapes{{16, 300}, {300}, {4, 4}, {}};
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const auto params = leaves(shapes, dtype);
    SM3Options options = SM3Options().momentum(0.9);
    if (dtype != at::kDouble) {
      options.momentum_dtype(at::kChar).kahan(true);
    }
    SM3 optimizer(params, options);
    const auto predicted = optimizer.state_bytes_by_kind();
    optimizer.init_state();
    EXPECT_EQ(optimizer.state_bytes_by_kind(), predicted) << dtype;
    EXPECT_EQ(predicted.at("step"), 32);
    EXPECT_EQ(predicted.at("compensation") > 0, dtype == at::kBFloat16);
  }
}

TEST(SM3Face, RandomNumbersGoByTheParameter) {
  const auto params = leaves({{8, 8}, {8, 8}}, at::kBFloat16);
  const auto others = copies(params);
  const SM3Options options = SM3Options(1e-3).stochastic_rounding(true);
  SM3 one_group(params, options);
  SM3 two_groups(groups_of(others, {options, options}));
  for (uint64_t step = 0; step < 3; ++step) {
    set_grads(params, step);
    set_grads(others, step);
    one_group.step();
    two_groups.step();
    expect_equal(params, others);
  }
}

TEST(SM3Face, AHintGivesAPieceTheCoverOfItsWhole) {
  const at::Tensor whole = at::randn({6, 8});
  const auto params = std::vector<at::Tensor>{leaf(whole)};
  const auto pieces = std::vector<at::Tensor>{leaf(whole.reshape(-1))};
  SM3 one(params, SM3Options());
  SM3 other(pieces, SM3Options());
  other.set_shape_hint(pieces[0], {6, 8});
  for (uint64_t step = 0; step < 3; ++step) {
    set_grads(params, step);
    pieces[0].mutable_grad() = params[0].grad().reshape(-1);
    one.step();
    other.step();
    EXPECT_TRUE(pieces[0].equal(params[0].reshape(-1)));
  }
  expect_equal(
      state_of(one, params[0]).accumulators(),
      state_of(other, pieces[0]).accumulators());
  EXPECT_EQ(
      error_of([&] { other.set_shape_hint(pieces[0], {6, 8}); }),
      "SM3: expected a parameter without state, but got one that has it; call "
      "set_shape_hint before the first step (argument 'param')");
}

class Listener : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    heard += warning.msg();
  }
  std::string heard;
};

TEST(SM3Face, ADenseStepAfterRowsOnlyWarns) {
  const auto params = leaves({{6, 4}});
  SM3 optimizer(params, SM3Options().compat("google"));
  Listener listener;
  const c10::WarningUtils::WarningHandlerGuard guard(&listener);
  params[0].mutable_grad() = coo({1}, at::ones({1, 4}), {6, 4});
  optimizer.step();
  EXPECT_EQ(listener.heard, "");
  set_grads(params, 1);
  optimizer.step();
  EXPECT_NE(listener.heard.find("left behind under compat"), std::string::npos)
      << listener.heard;
}
} // namespace
} // namespace torch_sm3::optim
