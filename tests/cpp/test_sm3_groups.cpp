// SPDX-License-Identifier: Apache-2.0
// Parameter groups of the C++ optimizer, and what it refuses.
#include <sm3_face_helpers.h>

#include <ATen/ops/zeros.h>
#include <torch/optim/sgd.h>

#include <limits>

namespace torch_sm3::optim {
namespace {

TEST(SM3Groups, GroupsTakeWhatTheyLeaveFromTheDefaults) {
  const auto params = leaves({{3, 4}, {3, 4}});
  SM3 optimizer(
      groups_of(params, {SM3Options(0.5), SM3Options().momentum(0.25)}),
      SM3Options(0.01).weight_decay(0.125));
  EXPECT_EQ(options_of(optimizer, 0).lr(), 0.5);
  EXPECT_EQ(options_of(optimizer, 0).weight_decay(), 0.125);
  EXPECT_EQ(options_of(optimizer, 1).lr(), 0.01);
  EXPECT_EQ(options_of(optimizer, 1).momentum(), 0.25);
  optimizer.init_state();
  EXPECT_FALSE(state_of(optimizer, params[0]).momentum_buffer().defined());
  EXPECT_TRUE(state_of(optimizer, params[1]).momentum_buffer().defined());
}

TEST(SM3Groups, AParameterListedTwiceIsUpdatedOnce) {
  const auto params = leaves({{3, 4}});
  const auto others = copies(params);
  SM3 twice({params[0], params[0]}, SM3Options());
  SM3 once(others, SM3Options());
  set_grads(params, 1);
  set_grads(others, 1);
  twice.step();
  once.step();
  expect_equal(params, others);
  EXPECT_EQ(state_of(twice, params[0]).step().item<int64_t>(), 1);
}

TEST(SM3Groups, DuplicatesOverGroupsAreRefused) {
  const auto params = leaves({{3, 4}});
  const std::string text =
      "some parameters appear in more than one parameter group";
  EXPECT_EQ(
      error_of([&] {
        SM3(groups_of({params[0], params[0]}, {SM3Options(), SM3Options()}));
      }),
      text);
  // Groups are open: what was put in behind our back is found by step().
  SM3 optimizer(params, SM3Options());
  optimizer.param_groups().emplace_back(params, std::make_unique<SM3Options>());
  EXPECT_EQ(error_of([&] { optimizer.step(); }), text);
}

TEST(SM3Groups, GroupsOfAnotherOptimizerAreRefused) {
  const auto params = leaves({{3, 4}});
  SM3 optimizer(params, SM3Options());
  optimizer.param_groups()[0].set_options(
      std::make_unique<torch::optim::SGDOptions>(0.1));
  EXPECT_EQ(
      error_of<c10::TypeError>([&] { optimizer.step(); }),
      "SM3: expected SM3Options, but got those of another optimizer "
      "(argument 'param_groups')");
}

TEST(SM3Groups, OptionsAndParametersAreChecked) {
  const auto params = leaves({{3, 4}});
  const auto text = [&](const SM3Options& options) {
    return error_of<c10::ValueError>([&] { SM3(params, options); });
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(
      text(SM3Options(nan)),
      "SM3: expected a finite number >= 0, but got nan (argument 'lr')");
  EXPECT_EQ(
      text(SM3Options().momentum(1)),
      "SM3: expected 0 <= momentum < 1, but got 1 (argument 'momentum')");
  EXPECT_EQ(
      text(SM3Options().beta2(0.0)),
      "SM3: expected none or 0 < beta2 <= 1 (other ports' beta=0 means the "
      "sum: "
      "pass none), but got 0 (argument 'beta2')");
  EXPECT_EQ(
      text(SM3Options().stochastic_rounding(true).kahan(true)),
      "SM3: expected stochastic_rounding or kahan, but got both "
      "(argument 'kahan')");
  EXPECT_EQ(
      error_of<c10::ValueError>(
          [] { SM3({at::zeros({2}, at::kComplexFloat)}); }),
      "SM3: expected real parameters, but got ComplexFloat; use separate real "
      "and imaginary ones (argument 'params')");
  EXPECT_EQ(
      error_of<c10::ValueError>(
          [] { SM3({at::zeros({1, 3}).expand({4, 3})}); }),
      "SM3: expected parameters whose elements do not share memory, but got "
      "strides [0, 1] (argument 'params')");
  EXPECT_EQ(
      error_of<c10::NotImplementedError>([] {
        SM3({at::zeros({2}, at::kDouble)},
            SM3Options().momentum_dtype(at::kChar));
      }),
      "SM3: expected float32 momentum for a float64 parameter, but got Char "
      "(argument 'momentum_dtype')");
  // A schedule, or a user, sets what a constructor would have refused.
  SM3 optimizer(params, SM3Options());
  options_of(optimizer).lr(-1);
  EXPECT_EQ(
      error_of<c10::ValueError>([&] { optimizer.step(); }),
      "SM3: expected a finite number >= 0, but got -1 (argument 'lr')");
}

TEST(SM3Groups, StateOfReplacedParametersIsDropped) {
  auto params = leaves({{3, 4}, {4}});
  SM3 optimizer(params, SM3Options());
  set_grads(params, 1);
  optimizer.step();
  const auto fresh = leaves({{5}});
  optimizer.param_groups()[0].params()[1] = fresh[0];
  set_grads(fresh, 1);
  optimizer.step();
  EXPECT_EQ(optimizer.state().size(), 2);
  EXPECT_EQ(state_of(optimizer, fresh[0]).step().item<int64_t>(), 1);
}

TEST(SM3Groups, HintsAreChecked) {
  const auto params = leaves({{10}, {2, 5}, {3}});
  SM3 optimizer({params[0], params[1]}, SM3Options());
  const auto text = [&](const at::Tensor& param, int64_t offset) {
    return error_of<c10::ValueError>(
        [&] { optimizer.set_shape_hint(param, {4, 5}, offset); });
  };
  optimizer.set_shape_hint(params[0], {4, 5}, 10);
  EXPECT_EQ(
      text(params[0], 11),
      "SM3: expected 10 elements within the shape [4, 5], but got offset 11 "
      "(argument 'offset')");
  EXPECT_EQ(
      text(params[1], 0),
      "SM3: expected a 1-D parameter, but got [2, 5] (argument 'param')");
  EXPECT_EQ(
      text(params[2], 0),
      "SM3: expected a parameter of this optimizer, but got another tensor of "
      "shape [3] (argument 'param')");
}

TEST(SM3Groups, CoversMakeTheirAccumulators) {
  const auto shapes = [](const Cover& cover,
                         const std::vector<int64_t>& shape) {
    const auto params = leaves({shape});
    SM3 optimizer(params, SM3Options().cover(cover));
    optimizer.init_state();
    std::vector<std::vector<int64_t>> all;
    for (const at::Tensor& n : state_of(optimizer, params[0]).accumulators()) {
      all.push_back(n.sizes().vec());
    }
    return all;
  };
  using Shapes = std::vector<std::vector<int64_t>>;
  EXPECT_EQ(shapes("auto", {2, 2}), (Shapes{{2, 2}}));
  EXPECT_EQ(shapes("standard", {2, 2}), (Shapes{{2}, {2}}));
  EXPECT_EQ(shapes("auto", {4, 1, 6}), (Shapes{{4}, {6}}));
  EXPECT_EQ(shapes("diagonal", {4, 1, 6}), (Shapes{{4, 6}}));
  EXPECT_EQ(shapes("standard", {}), (Shapes{{1}}));
  EXPECT_EQ(shapes("standard", {0, 3}), (Shapes{{0, 3}}));
  EXPECT_EQ(
      shapes(Cover::merge({{0}, {1, 2, 3}}), {8, 4, 3, 3}),
      (Shapes{{8}, {36}}));
  EXPECT_EQ(shapes(Cover::heads(0, 2), {8, 5}), (Shapes{{2, 4}, {2, 5}}));
  EXPECT_EQ(shapes(Cover::heads(0, 8), {8, 5}), (Shapes{{8, 5}}));
  EXPECT_EQ(shapes(Cover::blocks(-1, 2), {3, 6}), (Shapes{{3, 3}, {3, 2}}));
  EXPECT_EQ(shapes(Cover::axes({{1}, {}}), {3, 6}), (Shapes{{6}, {1}}));
  EXPECT_EQ(
      shapes(Cover::view({2, -1}, {{0}, {0, 1}}), {3, 6}),
      (Shapes{{2}, {2, 9}}));
}

TEST(SM3Groups, CoversThatDoNotFitAreRefused) {
  const auto text = [](const Cover& cover) {
    return error_of<c10::ValueError>([&] {
      SM3 optimizer(leaves({{3, 6}}), SM3Options().cover(cover));
      optimizer.init_state();
    });
  };
  EXPECT_EQ(
      text(Cover::heads(0, 2)),
      "SM3: expected heads that divide dimension 0 of [3, 6], but got 2 "
      "(argument 'cover')");
  EXPECT_EQ(
      text(Cover::merge({{0}})),
      "SM3: expected the dimensions of shape [3, 6] in merge, but got 1 "
      "dimensions (argument 'cover')");
  EXPECT_EQ(
      text(Cover::axes({{2}})),
      "SM3: expected axes of a view of 2 sizes, but got 2 (argument 'cover')");
  EXPECT_EQ(
      text(Cover::view({4, 4})),
      "SM3: expected a view of the 18 elements of a parameter of [3, 6], but "
      "got "
      "[4, 4] (argument 'cover')");
  for (const auto& make : std::vector<std::function<Cover()>>{
           [] { return Cover("rows"); },
           [] { return Cover::merge({}); },
           [] { return Cover::merge({{1}, {0}}); },
           [] { return Cover::axes({{0, 0}}); },
           [] { return Cover::heads(0, 0); },
           [] { return Cover::view({-1, -1}); }}) {
    EXPECT_NE(
        error_of<c10::ValueError>([&] { make(); }).find("(argument 'cover')"),
        std::string::npos);
  }
}
} // namespace
} // namespace torch_sm3::optim
