// SPDX-License-Identifier: Apache-2.0
// Archives of the C++ optimizer: options and state, every dtype and bit.
#include <sm3_face_helpers.h>

#include <ATen/ops/full.h>
#include <torch/serialize.h>

#include <sstream>

namespace torch_sm3::optim {
namespace {

using torch::optim::OptimizerParamGroup;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

void save_and_load(const SM3& from, SM3& to) {
  std::stringstream file;
  torch::save(from, file);
  torch::load(to, file);
}

SM3Options unusual() {
  return SM3Options(0.25)
      .momentum(0.5)
      .beta2(0.75)
      .eps(1e-6)
      .weight_decay(0.125)
      .variant("I")
      .compat("google")
      .cover(Cover::heads(0, 2))
      .maximize(true)
      .momentum_dtype(at::kBFloat16)
      .stochastic_rounding(true)
      .seed(7);
}

SM3Options written_and_read(const SM3Options& options) {
  std::stringstream file;
  OutputArchive out;
  options.serialize(out);
  out.save_to(file);
  InputArchive in;
  in.load_from(file);
  SM3Options read;
  read.serialize(in);
  return read;
}

// Trains, saves in the middle, and goes on from the archive as if nothing was.
void check_continuation(
    const SM3Options& options,
    const std::vector<std::vector<int64_t>>& shapes,
    at::ScalarType dtype) {
  at::manual_seed(1);
  const auto params = leaves(shapes, dtype);
  SM3 optimizer(params, options);
  for (uint64_t step = 0; step < 3; ++step) {
    set_grads(params, step);
    optimizer.step();
  }
  const auto others = copies(params);
  SM3 resumed(others, SM3Options(99));
  save_and_load(optimizer, resumed);
  EXPECT_TRUE(options_of(resumed) == options);
  for (size_t p = 0; p < params.size(); ++p) {
    EXPECT_TRUE(state_of(resumed, others[p]) == state_of(optimizer, params[p]));
  }
  for (uint64_t step = 3; step < 6; ++step) {
    set_grads(params, step);
    set_grads(others, step);
    optimizer.step();
    resumed.step();
    expect_equal(params, others);
  }
}

TEST(SerializeTest, Optim_SM3) {
  const std::vector<std::vector<int64_t>> shapes{{8, 6}, {6}, {3, 4, 5}, {}};
  check_continuation(SM3Options(), shapes, at::kFloat);
  check_continuation(SM3Options(0.2).momentum(0.9), shapes, at::kFloat);
  check_continuation(SM3Options().beta2(0.5).variant("I"), shapes, at::kDouble);
  check_continuation(SM3Options(0.01).kahan(true), shapes, at::kBFloat16);
  check_continuation(
      SM3Options(0.01).stochastic_rounding(true).seed(3),
      shapes,
      at::kBFloat16);
}

TEST(SerializeTest, test_sm3_row_3_int8_momentum_keeps_its_bits) {
  check_continuation(
      SM3Options().momentum(0.9).momentum_dtype(at::kChar),
      {{64, 300}, {64}},
      at::kFloat);
}

TEST(SerializeTest, test_sm3_row_28_the_saved_rate_wins) {
  const auto params = leaves({{3, 4}});
  const SM3 saved(params, SM3Options(0.1));
  SM3 loaded(params, SM3Options(0.2));
  save_and_load(saved, loaded);
  EXPECT_EQ(options_of(loaded).lr(), 0.1);
  // And is the one that a step takes.
  const at::Tensor before = params[0].detach().clone();
  params[0].mutable_grad() = at::full({3, 4}, 2.0);
  loaded.step();
  EXPECT_TRUE(params[0].equal(before.sub(0.1)));
}

TEST(SerializeTest, test_sm3_row_1_and_2_no_tensor_is_cast) {
  const auto params = leaves({{4, 6}}, at::kBFloat16);
  SM3 saved(params, SM3Options().momentum(0.9));
  saved.init_state();
  SM3ParamState& state = state_of(saved, params[0]);
  state.accumulators()[0].fill_(1.0001);
  state.step().fill_(int64_t{1} << 40);
  SM3 loaded(params, SM3Options());
  save_and_load(saved, loaded);
  const SM3ParamState& found = state_of(loaded, params[0]);
  EXPECT_EQ(found.accumulators()[0].scalar_type(), at::kFloat);
  EXPECT_EQ(found.accumulators()[0][2].item<float>(), 1.0001f);
  EXPECT_EQ(found.momentum_buffer().scalar_type(), at::kBFloat16);
  EXPECT_EQ(found.step().scalar_type(), at::kLong);
  EXPECT_EQ(found.step().item<int64_t>(), int64_t{1} << 40);
}

TEST(SerializeTest, OptionsGoBothWays) {
  EXPECT_TRUE(written_and_read(unusual()) == unusual());
  EXPECT_TRUE(written_and_read(SM3Options()) == SM3Options());
  EXPECT_FALSE(unusual() == SM3Options());
  SM3Options kahan;
  kahan.kahan(true).skip_nonfinite(true);
  EXPECT_TRUE(written_and_read(kahan) == kahan);
  for (const Cover& cover :
       {Cover("standard"),
        Cover::blocks(1, 8),
        Cover::merge({{0}, {1, 2}}),
        Cover::axes({{0, 2}, {}}),
        Cover::view({-1, 4}),
        Cover::view({2, -1}, {{0}, {0, 1}})}) {
    const SM3Options read = written_and_read(SM3Options().cover(cover));
    EXPECT_TRUE(read.cover() == cover) << cover.kind();
  }
}

TEST(SerializeTest, OptionsThatAnArchiveLacksKeepTheirDefaults) {
  std::stringstream file;
  OutputArchive out;
  out.write("lr", c10::IValue(0.5));
  out.save_to(file);
  InputArchive in;
  in.load_from(file);
  SM3Options read;
  read.serialize(in);
  EXPECT_TRUE(read == SM3Options(0.5));
}

TEST(SerializeTest, LoadReplacesWhatWasThere) {
  const auto params = leaves({{3, 4}, {4}});
  const SM3 fresh(params, SM3Options());
  SM3 used(params, SM3Options().momentum(0.9).skip_nonfinite(true));
  set_grads(params, 1);
  params[0].mutable_grad().fill_(std::numeric_limits<float>::infinity());
  used.step();
  EXPECT_EQ(used.skipped_steps(), 1);
  save_and_load(fresh, used);
  EXPECT_EQ(used.state().size(), 2);
  EXPECT_TRUE(state_of(used, params[0]).accumulators().empty());
  EXPECT_FALSE(state_of(used, params[0]).momentum_buffer().defined());
  EXPECT_EQ(used.skipped_steps(), 0);
}

TEST(SerializeTest, GroupsKeepTheirOwn) {
  const auto params = leaves({{8, 4}, {8, 4}});
  const auto groups = [&] {
    std::vector<OptimizerParamGroup> all;
    all.emplace_back(std::vector<at::Tensor>{params[0]});
    all.emplace_back(
        std::vector<at::Tensor>{params[1]},
        std::make_unique<SM3Options>(unusual()));
    return all;
  };
  SM3 saved(groups());
  SM3 loaded(groups(), SM3Options(3).momentum(0.1));
  save_and_load(saved, loaded);
  EXPECT_TRUE(options_of(loaded, 0) == SM3Options());
  EXPECT_TRUE(options_of(loaded, 1) == unusual());
}

TEST(SerializeTest, test_sm3_row_17_what_does_not_fit_is_refused_whole) {
  const auto params = leaves({{3, 4}, {4}});
  SM3 saved(params, SM3Options(0.3));
  set_grads(params, 1);
  saved.step();
  const auto refused = [&](const std::vector<std::vector<int64_t>>& shapes) {
    const auto others = leaves(shapes);
    SM3 loaded(others, SM3Options(0.7));
    const std::string text =
        error_of<c10::ValueError>([&] { save_and_load(saved, loaded); });
    EXPECT_EQ(options_of(loaded).lr(), 0.7);
    EXPECT_TRUE(state_of(loaded, others[0]).accumulators().empty());
    return text;
  };
  EXPECT_EQ(
      refused({{3, 4}}),
      "SM3: expected 1 parameters in group 0, but got 2 (argument 'archive')");
  EXPECT_EQ(
      refused({{3, 4}, {5}}),
      "SM3: expected accumulators of shapes [5] for parameter 1 of shape [5], "
      "but got [4] (argument 'state')");
  EXPECT_NE(refused({{4, 3}, {4}}).find("[4], [3]"), std::string::npos);
}

} // namespace
} // namespace torch_sm3::optim
