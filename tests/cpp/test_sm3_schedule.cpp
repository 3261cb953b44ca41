// SPDX-License-Identifier: Apache-2.0
#include <sm3_face_helpers.h>
#include <torch_sm3/sm3_schedule.h>

#include <torch/serialize/archive.h>

#include <cmath>
#include <sstream>

namespace torch_sm3::optim {
namespace {

using torch::optim::OptimizerParamGroup;

SM3 two_groups() {
  const std::vector<at::Tensor> params = leaves({{3}, {4}});
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{params[0]});
  groups.emplace_back(
      std::vector<at::Tensor>{params[1]}, std::make_unique<SM3Options>(0.03));
  return SM3(groups, SM3Options(0.7));
}

// The rates of steps 1, 2, ... of both groups.
std::vector<std::vector<double>>
rates(int64_t warmup, const WarmupConstantLROptions& options, int64_t steps) {
  SM3 optimizer = two_groups();
  WarmupConstantLR schedule(optimizer, warmup, options);
  std::vector<std::vector<double>> all;
  for (int64_t t = 1; t <= steps; ++t) {
    all.push_back(
        {options_of(optimizer, 0).lr(), options_of(optimizer, 1).lr()});
    schedule.step();
  }
  return all;
}

TEST(WarmupConstantLR, FollowsItsClosedForm) {
  for (const double power : {0.5, 1.0, 2.0}) {
    for (const int64_t warmup : {0, 1, 7}) {
      const WarmupConstantLROptions options{power, 40, 0.1};
      const auto found = rates(warmup, options, 44);
      for (int64_t t = 1; t <= 44; ++t) {
        const double up =
            warmup == 0
                ? 1
                : std::min(1.0, std::pow(double(t) / double(warmup), power));
        const double cool = t <= 36 ? 1 : t <= 40 ? (40 - t + 1) / 4.0 : 0;
        EXPECT_DOUBLE_EQ(found[t - 1][0], 0.7 * (up * cool)) << t;
        EXPECT_DOUBLE_EQ(found[t - 1][1], 0.03 * (up * cool)) << t;
      }
    }
  }
}

TEST(WarmupConstantLR, StaysConstantWithoutAnEnd) {
  const auto found = rates(3, {}, 1000);
  EXPECT_DOUBLE_EQ(found[0][0], 0.7 / 9);
  EXPECT_EQ(found[2][0], 0.7);
  EXPECT_EQ(found[999][0], 0.7);
}

TEST(WarmupConstantLR, WastesNoStep) {
  const auto found = rates(4, {2.0, 10, 0.4}, 11);
  for (int t = 1; t <= 10; ++t) {
    EXPECT_GT(found[t - 1][0], 0) << t;
  }
  EXPECT_EQ(found[10][0], 0);
}

TEST(WarmupConstantLR, RoundsTheCooldownToEven) {
  // 2.5 steps are 2.
  const auto found = rates(0, {2.0, 5, 0.5}, 5);
  EXPECT_EQ(found[2][0], 0.7);
  EXPECT_EQ(found[3][0], 0.7);
  EXPECT_EQ(found[4][0], 0.35);
}

TEST(WarmupConstantLR, ContinuesFromAnArchive) {
  const WarmupConstantLROptions options{2.0, 30, 0.2};
  SM3 first = two_groups();
  WarmupConstantLR schedule(first, 5, options);
  std::stringstream file;
  for (int t = 1; t < 4; ++t) {
    schedule.step();
  }
  torch::serialize::OutputArchive out;
  schedule.save(out);
  out.save_to(file);

  SM3 second = two_groups();
  options_of(second, 0).lr(123);
  WarmupConstantLR resumed(second, 5, options);
  torch::serialize::InputArchive in;
  in.load_from(file);
  resumed.load(in);
  for (int t = 4; t < 33; ++t) {
    for (const size_t group : {0, 1}) {
      EXPECT_EQ(options_of(first, group).lr(), options_of(second, group).lr())
          << t;
    }
    schedule.step();
    resumed.step();
  }
}

TEST(WarmupConstantLR, RefusesWhatItCannotDo) {
  const auto text = [](int64_t warmup, WarmupConstantLROptions options) {
    return error_of<c10::ValueError>([&] { rates(warmup, options, 0); });
  };
  EXPECT_EQ(
      text(-1, {}),
      "WarmupConstantLR: expected a number >= 0, but got -1 "
      "(argument 'warmup_steps')");
  EXPECT_EQ(
      text(1, {0.0, std::nullopt, 0.0}),
      "WarmupConstantLR: expected a finite number > 0, but got 0 "
      "(argument 'power')");
  EXPECT_EQ(
      text(1, {2.0, 10, 1.0}),
      "WarmupConstantLR: expected 0 <= cooldown_fraction < 1, but got 1 "
      "(argument 'cooldown_fraction')");
  EXPECT_EQ(
      text(1, {2.0, std::nullopt, 0.1}),
      "WarmupConstantLR: expected a number with cooldown_fraction > 0, but got "
      "none (argument 'total_steps')");
  EXPECT_EQ(
      text(8, {2.0, 10, 0.3}),
      "WarmupConstantLR: expected at least 11 (warm-up and cool-down), but got "
      "10 (argument 'total_steps')");
}

} // namespace
} // namespace torch_sm3::optim
