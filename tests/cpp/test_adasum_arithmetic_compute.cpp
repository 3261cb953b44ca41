// SPDX-License-Identifier: Apache-2.0

/// \file
/// adasum_compute.h on the CPU: tiles and threads, the wire, the second pass,
/// subnormals and the hash.

#include "adasum_values.h"

#include <adasum_compute.h>
#include <adasum_cpu.h>
#include <adasum_scales.h>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

namespace {

using namespace torch_sm3::distributed;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::array<at::ScalarType, 4> kTypes = {
    at::kFloat,
    at::kDouble,
    at::kHalf,
    at::kBFloat16};

Layout test_layout() {
  return Layout({5, 70001, 16384, 1, 0, 33000});
}

Range all_tiles(const Layout& layout) {
  return {0, static_cast<int64_t>(layout.tiles().size())};
}

Rows random_rows(const Layout& layout, int64_t p, at::ScalarType dtype) {
  Rows rows;
  const at::Tensor common = at::randn({layout.elements()}, at::kDouble);
  for (int64_t i = 0; i < p; ++i) {
    const at::Tensor own = at::randn({layout.elements()}, at::kDouble);
    rows.data.push_back((common + own).to(dtype));
  }
  return rows;
}

Rows part_of(const Layout& layout, Range tiles, const Rows& rows) {
  const Range elements = layout.elements_of(tiles);
  Rows part;
  for (const at::Tensor& row : rows.data) {
    part.data.push_back(row.narrow(0, elements.first, elements.size()));
  }
  if (rows.scales.defined()) {
    part.scales = rows.scales.narrow(0, tiles.first, tiles.size());
  }
  return part;
}

Coded empty_code(const Layout& layout, Range tiles, at::ScalarType wire) {
  Coded coded;
  coded.data = at::empty({layout.elements_of(tiles).size()}, wire);
  if (wire == at::kHalf) {
    coded.scales = at::empty({tiles.size()}, at::kDouble);
  }
  return coded;
}

Coded encoded(const Layout& layout, const at::Tensor& x, at::ScalarType wire) {
  Coded coded = empty_code(layout, all_tiles(layout), wire);
  encode_tiles(layout, all_tiles(layout), x, coded);
  return coded;
}

at::Tensor
decoded(const Layout& layout, const Coded& coded, at::ScalarType dtype) {
  at::Tensor out = at::empty({layout.elements()}, dtype);
  decode_tiles(layout, all_tiles(layout), coded, out);
  return out;
}

// --- tiles and threads ------------------------------------------------------

class Threads : public ::testing::Test {
 protected:
  void TearDown() override {
    at::set_num_threads(before_);
  }

 private:
  int before_ = at::get_num_threads();
};

TEST_F(Threads, ChangeNoBit) {
  const Layout layout = test_layout();
  const Range all = all_tiles(layout);
  for (const at::ScalarType dtype : kTypes) {
    const Rows rows = random_rows(layout, 3, dtype);
    const at::Tensor c = at::randn({layout.layers(), 3}, at::kDouble);
    std::vector<std::vector<at::Tensor>> results;
    for (const int threads : {1, 2, 3, 4}) {
      at::set_num_threads(threads);
      at::Tensor out = at::empty({layout.elements()}, dtype);
      combine_tiles(layout, all, rows, c, out);
      const Coded code = encoded(layout, rows.data[0], at::kHalf);
      results.push_back(
          {dots_of_tiles(layout, all, rows, Accumulate::kFloat64),
           dots_of_tiles(layout, all, rows, Accumulate::kFloat32),
           out,
           code.data,
           code.scales,
           hash_of(out)});
    }
    for (size_t t = 1; t < results.size(); ++t) {
      for (size_t k = 0; k < results[0].size(); ++k) {
        EXPECT_TRUE(at::equal(results[t][k], results[0][k])) << k;
      }
    }
  }
}

TEST_F(Threads, AreLimitedWhileTheGuardExists) {
  EXPECT_EQ(set_kernel_threads(0), 0);
  {
    const ThreadLimit outer(2);
    {
      const ThreadLimit inner(1);
      EXPECT_EQ(set_kernel_threads(1), 1);
    }
    EXPECT_EQ(set_kernel_threads(2), 2);
  }
  EXPECT_EQ(set_kernel_threads(0), 0);
}

TEST(AdasumCompute, AnyRunOfTilesHasTheBitsOfTheWhole) {
  const Layout layout = test_layout();
  const Range all = all_tiles(layout);
  Rows rows = random_rows(layout, 2, at::kFloat);
  rows.scales = at::ones({all.size(), 2}, at::kDouble);
  rows.scales.select(1, 1).fill_(0.25);
  const at::Tensor c = at::randn({layout.layers(), 2}, at::kDouble);
  const at::Tensor dots =
      dots_of_tiles(layout, all, rows, Accumulate::kFloat64);
  at::Tensor sum = at::empty({layout.elements()}, at::kFloat);
  combine_tiles(layout, all, rows, c, sum);
  for (const Range run : {Range{0, 1}, Range{2, 5}, Range{3, all.last}}) {
    const Rows part = part_of(layout, run, rows);
    EXPECT_TRUE(
        at::equal(
            dots_of_tiles(layout, run, part, Accumulate::kFloat64),
            dots.narrow(0, run.first, run.size())));
    const Range elements = layout.elements_of(run);
    at::Tensor out = at::empty({elements.size()}, at::kFloat);
    combine_tiles(layout, run, part, c, out);
    EXPECT_TRUE(at::equal(out, sum.narrow(0, elements.first, elements.size())));
  }
}

TEST(AdasumCompute, NothingIsNoError) {
  const Layout layout(std::vector<int64_t>{0, 0});
  const Rows rows = random_rows(layout, 2, at::kFloat);
  const at::Tensor dots =
      dots_of_tiles(layout, {0, 0}, rows, Accumulate::kFloat64);
  EXPECT_EQ(dots.numel(), 0);
  const at::Tensor gram = add_tiles(layout, {0, 2}, dots);
  EXPECT_TRUE(at::equal(gram, at::zeros({2, 2, 2}, at::kDouble)));
  encoded(layout, rows.data[0], at::kHalf);
  EXPECT_EQ(exponents_of_tiles(layout, {0, 0}, rows).numel(), 0);
}

// --- the wire ---------------------------------------------------------------

TEST(AdasumWire, LargestElementOfATileLiesBelow2To15) {
  const Layout layout = test_layout();
  const at::Tensor x = at::randn({layout.elements()}, at::kFloat) * 1e-20;
  const Coded coded = encoded(layout, x, at::kHalf);
  const auto* scales = coded.scales.const_data_ptr<double>();
  for (size_t t = 0; t < layout.tiles().size(); ++t) {
    const Tile& tile = layout.tiles()[t];
    const double largest =
        x.narrow(0, tile.start, tile.size).abs().max().item<double>();
    EXPECT_GE(largest / scales[t], 0x1p14);
    EXPECT_LT(largest / scales[t], 0x1p15);
    int exponent = 0;
    EXPECT_EQ(std::frexp(scales[t], &exponent), 0.5) << "a power of two";
  }
}

TEST(AdasumWire, IsOffByHalfADigitOfFloat16) {
  const Layout layout = test_layout();
  for (const double size : {1e-30, 1.0, 1e30}) {
    const at::Tensor x = at::randn({layout.elements()}, at::kDouble) * size;
    const at::Tensor back =
        decoded(layout, encoded(layout, x, at::kHalf), at::kDouble);
    // Elements more than 2^29 below their tile's largest are subnormal.
    const at::Tensor bound = x.abs() * 0x1p-11 + x.abs().max() * 0x1p-38;
    EXPECT_TRUE(((back - x).abs() <= bound).all().item<bool>());
  }
}

TEST(AdasumWire, TakesWhatIsAlreadyFloat16AsItIs) {
  const Layout layout = test_layout();
  for (const at::ScalarType wire : {at::kHalf, at::kBFloat16}) {
    const at::Tensor x = at::randn({layout.elements()}, at::kFloat).to(wire);
    const at::Tensor wide = x.to(at::kFloat);
    const Coded once = encoded(layout, wide, wire);
    EXPECT_TRUE(at::equal(decoded(layout, once, at::kFloat), wide));
    const Coded twice =
        encoded(layout, decoded(layout, once, at::kFloat), wire);
    EXPECT_TRUE(at::equal(twice.data, once.data)) << "rounds only once";
  }
}

TEST(AdasumWire, KeepsTheEndsOfEveryType) {
  const Layout layout(std::vector<int64_t>{40});
  for (const double value :
       {0x1p-149, 0x1.fffffep127, 0x1p-1074, 0x1.8p-1070, 0x1p1023, 0x1p-30}) {
    const at::Tensor x = at::full({40}, value, at::kDouble);
    const at::Tensor back =
        decoded(layout, encoded(layout, x, at::kHalf), at::kDouble);
    const double error = (back - x).abs().max().item<double>();
    EXPECT_LE(error, std::max(value * 0x1p-11, 0x1p-1047)) << value;
    EXPECT_TRUE(std::isfinite(back[0].item<double>()));
  }
}

TEST(AdasumWire, KeepsZerosAndTheirSigns) {
  const Layout layout(std::vector<int64_t>{70});
  at::Tensor x = at::zeros({70}, at::kFloat);
  x[3].fill_(-0.0);
  for (const at::ScalarType wire : {at::kHalf, at::kBFloat16}) {
    const at::Tensor back =
        decoded(layout, encoded(layout, x, wire), at::kFloat);
    EXPECT_TRUE(at::equal(back.view(at::kInt), x.view(at::kInt)));
  }
}

TEST(AdasumWire, KeepsWhatIsNotFiniteAndItsNeighbours) {
  const Layout layout(std::vector<int64_t>{100, 40});
  for (const at::ScalarType wire : {at::kHalf, at::kBFloat16}) {
    at::Tensor x = at::full({140}, 1e-6, at::kFloat);
    x[7].fill_(std::nan(""));
    x[50].fill_(kInfinity);
    x[51].fill_(-kInfinity);
    const at::Tensor back =
        decoded(layout, encoded(layout, x, wire), at::kFloat);
    EXPECT_TRUE(std::isnan(back[7].item<float>()));
    EXPECT_EQ(back[50].item<float>(), kInfinity);
    EXPECT_EQ(back[51].item<float>(), -kInfinity);
    for (const int64_t other : {0, 60, 130}) {
      EXPECT_NEAR(back[other].item<float>(), 1e-6, 1e-6 * 0x1p-8);
    }
  }
}

TEST(AdasumWire, DotsAndSumsOfCodesAreThoseOfTheirValues) {
  const Layout layout = test_layout();
  const Range all = all_tiles(layout);
  const Rows leaves = random_rows(layout, 3, at::kFloat);
  const at::Tensor c = at::randn({layout.layers(), 3}, at::kDouble);
  Rows codes, values;
  std::vector<at::Tensor> scales;
  for (const at::Tensor& leaf : leaves.data) {
    const Coded coded = encoded(layout, leaf, at::kHalf);
    codes.data.push_back(coded.data);
    scales.push_back(coded.scales);
    values.data.push_back(decoded(layout, coded, at::kFloat));
  }
  codes.scales = at::stack(scales, 1).contiguous();
  EXPECT_TRUE(
      at::equal(
          dots_of_tiles(layout, all, codes, Accumulate::kFloat64),
          dots_of_tiles(layout, all, values, Accumulate::kFloat64)));
  at::Tensor sum = at::empty({layout.elements()}, at::kDouble);
  at::Tensor want = at::empty({layout.elements()}, at::kDouble);
  combine_tiles(layout, all, codes, c, sum);
  combine_tiles(layout, all, values, c, want);
  EXPECT_TRUE(at::equal(sum, want));
  for (const at::ScalarType wire : {at::kHalf, at::kBFloat16}) {
    Coded direct = empty_code(layout, all, wire);
    combine_coded(layout, all, codes, c, direct);
    const Coded apart = encoded(layout, sum, wire);
    EXPECT_TRUE(at::equal(direct.data, apart.data)) << "rounded once";
  }
}

// --- the second pass --------------------------------------------------------

TEST(AdasumSecondPass, GivesTheDotsOfScaledLeaves) {
  const Layout layout(std::vector<int64_t>{20000, 300, 50});
  const Range all = all_tiles(layout);
  const Range layers{0, layout.layers()};
  Rows rows = random_rows(layout, 2, at::kDouble);
  const at::Tensor plain = add_tiles(
      layout, layers, dots_of_tiles(layout, all, rows, Accumulate::kFloat64));
  // The first layer leaves the range, the others stay.
  rows.data[0].narrow(0, 0, 20000).mul_(0x1p1000);
  rows.data[1].narrow(0, 0, 20000).mul_(0x1p-1000);
  const at::Tensor partial =
      dots_of_tiles(layout, all, rows, Accumulate::kFloat64);
  const at::Tensor first = add_tiles(layout, layers, partial);
  const at::Tensor flags = need_second_pass(first, Accumulate::kFloat64);
  EXPECT_TRUE(flags[0].item<bool>());
  EXPECT_FALSE(flags[1].item<bool>());
  const at::Tensor exponents = exponents_of_tiles(layout, all, rows, flags);
  const at::Tensor shifts = shifts_of_layers(layout, layers, exponents);
  EXPECT_EQ(shifts[1][0].item<int32_t>(), 0);
  rows.scales = scales_of_tiles(layout, all, rows, shifts);
  EXPECT_EQ(rows.scales[2][1].item<double>(), 1.0);
  repeat_dots_of_tiles(layout, all, rows, flags, partial);
  const at::Tensor second = add_tiles(layout, layers, partial);
  EXPECT_TRUE(at::equal(second.narrow(0, 1, 2), plain.narrow(0, 1, 2)));
  const int32_t a = shifts[0][0].item<int32_t>();
  const int32_t b = shifts[0][1].item<int32_t>();
  const double want = std::ldexp(plain[0][0][1].item<double>(), -(a + b));
  EXPECT_EQ(second[0][0][1].item<double>(), want) << "scaling is exact";
}

TEST(AdasumSecondPass, ReachesBothEndsOfFloat64) {
  const Layout layout(std::vector<int64_t>{10});
  const Range one{0, 1};
  for (const double value : {0x1p-1074, 0x1.fffffffffffffp1023, 1e-300}) {
    Rows rows{{at::full({10}, value, at::kDouble)}, {}};
    const at::Tensor shifts =
        shifts_of_layers(layout, one, exponents_of_tiles(layout, one, rows));
    rows.scales = scales_of_tiles(layout, one, rows, shifts);
    const at::Tensor gram = add_tiles(
        layout, one, dots_of_tiles(layout, one, rows, Accumulate::kFloat64));
    const double scaled =
        value * std::ldexp(1.0, -shifts[0][0].item<int32_t>());
    EXPECT_DOUBLE_EQ(gram.item<double>(), 10 * (scaled * scaled));
    EXPECT_FALSE(need_second_pass(gram, Accumulate::kFloat64)[0].item<bool>());
  }
}

TEST(AdasumSecondPass, ExponentsCountTheScalesOfTheWire) {
  const Layout layout(std::vector<int64_t>{10, 10, 10});
  const Range all = all_tiles(layout);
  at::Tensor x = at::zeros({30}, at::kFloat);
  x[3].fill_(3.0);
  x[15].fill_(kInfinity);
  Rows rows{{x}, {}};
  const at::Tensor plain = exponents_of_tiles(layout, all, rows);
  EXPECT_EQ(plain[0][0].item<int32_t>(), 2);
  EXPECT_EQ(plain[1][0].item<int32_t>(), kNoExponent);
  EXPECT_EQ(plain[2][0].item<int32_t>(), kNoExponent);
  rows.scales = at::full({3, 1}, 0x1p-5, at::kDouble);
  EXPECT_EQ(exponents_of_tiles(layout, all, rows)[0][0].item<int32_t>(), -3);
}

// --- subnormals -------------------------------------------------------------

class Flushing : public ::testing::Test {
 protected:
  void TearDown() override {
    at::globalContext().setFlushDenormal(false);
    at::set_num_threads(before_);
  }

 private:
  int before_ = at::get_num_threads();
};

TEST_F(Flushing, ReadsSubnormalsAsZerosInEveryThread) {
  const Layout layout(std::vector<int64_t>{20 * kTile});
  const Range all = all_tiles(layout);
  const at::Tensor x = at::full({layout.elements()}, 1e-40, at::kFloat);
  const Rows rows{{x, x}, {}};
  at::set_num_threads(4);
  // The threads of the pool exist before the mode is set in this one.
  at::Tensor dots = dots_of_tiles(layout, all, rows, Accumulate::kFloat64);
  EXPECT_TRUE((dots > 0).all().item<bool>());
  if (!at::globalContext().setFlushDenormal(true)) {
    GTEST_SKIP() << "this machine cannot flush subnormals";
  }
  dots = dots_of_tiles(layout, all, rows, Accumulate::kFloat64);
  at::Tensor sum = at::empty({layout.elements()}, at::kDouble);
  combine_tiles(layout, all, rows, at::ones({1, 2}, at::kDouble), sum);
  const at::Tensor exponents = exponents_of_tiles(layout, all, rows);
  const Coded coded = encoded(layout, x, at::kHalf);
  at::globalContext().setFlushDenormal(false);
  EXPECT_TRUE((dots == 0).all().item<bool>());
  EXPECT_TRUE((sum == 0).all().item<bool>());
  EXPECT_TRUE((exponents == kNoExponent).all().item<bool>());
  EXPECT_TRUE((coded.data == 0).all().item<bool>());
}

// --- the hash ---------------------------------------------------------------

TEST(AdasumHash, ChangesWithEveryBitAndTheLength) {
  const at::Tensor x = at::randn({1001}, at::kFloat);
  const int64_t want = hash_of(x).item<int64_t>();
  EXPECT_EQ(hash_of(x.clone()).item<int64_t>(), want);
  for (const int64_t word : {0, 500, 1000}) {
    for (const int bit : {0, 17, 31}) {
      at::Tensor other = x.clone();
      static_cast<uint32_t*>(other.mutable_data_ptr())[word] ^= 1u << bit;
      EXPECT_NE(hash_of(other).item<int64_t>(), want);
    }
  }
  const at::Tensor zeros = at::zeros({64}, at::kFloat);
  EXPECT_NE(
      hash_of(zeros).item<int64_t>(),
      hash_of(zeros.narrow(0, 0, 62)).item<int64_t>());
  EXPECT_NE(hash_of(x).item<int64_t>(), hash_of(x.flip(0)).item<int64_t>());
}

} // namespace
