// SPDX-License-Identifier: Apache-2.0

/// \file
/// The CPU kernels of Adasum against slow sums, and against each other.

#include "adasum_values.h"

#include <adasum_compute.h>
#include <adasum_cpu.h>
#include <adasum_scales.h>

#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace {

using namespace torch_sm3::distributed;
using torch_sm3::ScalarKind;
using namespace adasum_values;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");

// Every way of cutting: part of a step, of a row of lanes, a chunk, a strip.
constexpr std::array<int64_t, 8> kSizes =
    {1, 31, 32, 33, 511, 513, 4097, kTile};

std::vector<double> dots_of(
    const AdasumKernels& kernels,
    const Stack& stack,
    bool float32 = false,
    const double* scales = nullptr) {
  const int64_t p = stack.p();
  std::vector<double> scratch(dots_scratch(p));
  std::vector<double> sums(pair_count(p), -1.0);
  kernels.dots(stack.tile(scales), float32, scratch.data(), sums.data());
  return sums;
}

TEST(AdasumDots, HaveTheSameBitsForEveryInstructionSet) {
  for (const ScalarKind kind : kKinds) {
    for (const int64_t size : kSizes) {
      for (const int64_t p : {1, 2, 3, 4, 5, 8, 9}) {
        const Stack stack = Stack::random(p, size, kind);
        for (const bool float32 : {false, true}) {
          const auto want = dots_of(scalar::kAdasumKernels, stack, float32);
          for (const AdasumKernels* kernels : stronger_kernels()) {
            EXPECT_TRUE(same_bits(dots_of(*kernels, stack, float32), want))
                << size << " elements of kind " << static_cast<int>(kind)
                << ", p = " << p << ", float32 = " << float32;
          }
        }
      }
    }
  }
}

TEST(AdasumDots, AddInTheOrderOfTheHeader) {
  for (const int64_t size : kSizes) {
    const Stack stack = Stack::random(2, size, ScalarKind::kFloat64);
    const auto sums = dots_of(scalar::kAdasumKernels, stack);
    EXPECT_EQ(sums[1], ordered_dot(stack, 0, 1)) << size;
  }
}

TEST(AdasumDots, AreWithinTheirBoundInFloat32) {
  for (const ScalarKind kind :
       {ScalarKind::kFloat32, ScalarKind::kFloat16, ScalarKind::kBFloat16}) {
    for (const int64_t size : kSizes) {
      for (const bool equal : {false, true}) {
        // Equal elements round alike, which is the worst case.
        const Stack stack =
            equal ? Stack::equal(4, size, kind) : Stack::random(4, size, kind);
        const auto exact = dots_of(scalar::kAdasumKernels, stack);
        const auto rounded = dots_of(scalar::kAdasumKernels, stack, true);
        for (int64_t i = 0; i < 4; ++i) {
          for (int64_t j = i; j < 4; ++j) {
            const int64_t k = pair_index(4, i, j);
            const double bound = 1e-7 * std::sqrt(
                                            exact[pair_index(4, i, i)] *
                                            exact[pair_index(4, j, j)]);
            EXPECT_LE(std::fabs(rounded[k] - exact[k]), bound)
                << size << ": " << i << ", " << j;
          }
        }
      }
    }
  }
}

TEST(AdasumDots, OfScaledRowsAreThoseOfTheirProducts) {
  const std::vector<double> scales = {0x1p-3, 0x1p7, 1.0};
  for (const ScalarKind kind : kKinds) {
    const Stack stack = Stack::random(3, 5000, kind);
    const auto plain = dots_of(scalar::kAdasumKernels, stack);
    for (const bool float32 : {false, true}) {
      const auto unscaled = dots_of(scalar::kAdasumKernels, stack, float32);
      const auto scaled =
          dots_of(scalar::kAdasumKernels, stack, float32, scales.data());
      for (int64_t i = 0; i < 3; ++i) {
        for (int64_t j = i; j < 3; ++j) {
          const int64_t k = pair_index(3, i, j);
          EXPECT_EQ(scaled[k], unscaled[k] * scales[i] * scales[j]);
        }
      }
    }
  }
}

TEST(AdasumDots, OfFloat64SurviveItsEndsWithScales) {
  Stack stack = Stack::random(2, 100, ScalarKind::kFloat64);
  const std::vector<double> want = dots_of(scalar::kAdasumKernels, stack);
  stack.multiply(0, 0x1p1000);
  stack.multiply(1, 0x1p-1000);
  const std::vector<double> scales = {0x1p-1000, 0x1p1000};
  for (const AdasumKernels* kernels : all_kernels()) {
    EXPECT_EQ(dots_of(*kernels, stack, false, scales.data()), want);
    EXPECT_EQ(dots_of(*kernels, stack)[0], kInfinity);
    EXPECT_EQ(dots_of(*kernels, stack)[2], 0.0);
  }
}

TEST(AdasumDots, AreExactAtTheEndsOfTheNarrowTypes) {
  for (const ScalarKind kind :
       {ScalarKind::kFloat32, ScalarKind::kFloat16, ScalarKind::kBFloat16}) {
    for (const double value : {largest_value(kind), smallest_value(kind)}) {
      Stack stack = Stack::filled(1, 40, kind, value);
      for (const AdasumKernels* kernels : all_kernels()) {
        EXPECT_EQ(dots_of(*kernels, stack)[0], 40 * (value * value));
      }
    }
  }
}

TEST(AdasumDots, ShowWhatIsNotFinite) {
  for (const ScalarKind kind : kKinds) {
    for (const double value : {kInfinity, -kInfinity, kNan}) {
      Stack stack = Stack::random(2, 70, kind);
      stack.set(1, 65, value);
      for (const bool float32 : {false, true}) {
        for (const AdasumKernels* kernels : all_kernels()) {
          const auto sums = dots_of(*kernels, stack, float32);
          EXPECT_TRUE(std::isfinite(sums[0]));
          EXPECT_FALSE(std::isfinite(sums[1]));
          EXPECT_FALSE(std::isfinite(sums[2]));
        }
      }
    }
  }
}

std::vector<char> combined(
    const AdasumKernels& kernels,
    const Stack& stack,
    const std::vector<double>& coefficients,
    ScalarKind kind,
    bool streams = false,
    const double* scales = nullptr) {
  std::vector<char> out(stack.size() * size_of(kind) + 64);
  kernels.combine(
      stack.tile(scales), coefficients.data(), out.data(), kind, streams);
  return out;
}

TEST(AdasumCombine, HasTheSameBitsForEveryInstructionSetAndWayOfWriting) {
  const std::vector<double> coefficients = {0.3, -1.7, 1e-3, 2.0, 5.5};
  const std::vector<double> scales = {1.0, 0x1p-4, 0x1p3, 1.0, 0x1p20};
  for (const ScalarKind from : kKinds) {
    for (const ScalarKind to : kKinds) {
      for (const int64_t size : kSizes) {
        for (const int64_t p : {1, 2, 5}) {
          const Stack stack = Stack::random(p, size, from);
          for (const double* scale : {scales.data(), (const double*)nullptr}) {
            const auto want = combined(
                scalar::kAdasumKernels, stack, coefficients, to, false, scale);
            for (const AdasumKernels* kernels : all_kernels()) {
              for (const bool streams : {false, true}) {
                EXPECT_EQ(
                    combined(*kernels, stack, coefficients, to, streams, scale),
                    want);
              }
            }
          }
        }
      }
    }
  }
}

TEST(AdasumCombine, RoundsTheOrderedSumOnce) {
  const std::vector<double> coefficients = {0.3, -1.7, 1e-3};
  for (const ScalarKind from : kKinds) {
    const Stack stack = Stack::random(3, 77, from);
    const auto out = combined(
        scalar::kAdasumKernels, stack, coefficients, ScalarKind::kFloat64);
    for (int64_t e = 0; e < 77; ++e) {
      double sum = 0.0;
      for (int64_t i = 0; i < 3; ++i) {
        sum += coefficients[i] * stack.at(i, e);
      }
      EXPECT_EQ(value_at(out.data(), e, ScalarKind::kFloat64), sum);
    }
  }
}

TEST(AdasumCombine, OfOneLeafKeepsEveryBit) {
  for (const ScalarKind kind : kKinds) {
    Stack stack = Stack::random(1, 20, kind);
    stack.set(0, 3, -0.0);
    stack.set(0, 4, kNan);
    const auto out = combined(scalar::kAdasumKernels, stack, {1.0}, kind);
    EXPECT_EQ(std::memcmp(out.data(), stack.row(0), 20 * size_of(kind)), 0);
  }
}

TEST(AdasumCombine, MayOverwriteARow) {
  const std::vector<double> coefficients = {0.3, -1.7};
  for (const ScalarKind kind : kKinds) {
    for (const AdasumKernels* kernels : all_kernels()) {
      Stack stack = Stack::random(2, 1000, kind);
      const auto want = combined(*kernels, stack, coefficients, kind);
      kernels->combine(
          stack.tile(), coefficients.data(), stack.row(1), kind, false);
      EXPECT_EQ(
          std::memcmp(want.data(), stack.row(1), 1000 * size_of(kind)), 0);
    }
  }
}

TEST(AdasumCombine, OverflowsElementByElement) {
  const Stack stack = Stack::filled(2, 40, ScalarKind::kFloat16, 60000.0);
  for (const AdasumKernels* kernels : all_kernels()) {
    const auto narrow =
        combined(*kernels, stack, {1.0, 1.0}, ScalarKind::kFloat16);
    EXPECT_EQ(value_at(narrow.data(), 0, ScalarKind::kFloat16), kInfinity);
    const auto wide =
        combined(*kernels, stack, {1.0, 1.0}, ScalarKind::kFloat32);
    EXPECT_EQ(value_at(wide.data(), 0, ScalarKind::kFloat32), 120000.0);
  }
}

// Numbers on, beside and near the ties, ends and subnormals of every type.
std::vector<double> awkward_numbers() {
  std::vector<double> numbers = {0.0, -0.0, kInfinity, -kInfinity, kNan, -kNan};
  for (int exponent = -1074; exponent < 1024; exponent += 3) {
    for (const double digits :
         {1.0,
          1.5,
          0x1.001p0,
          0x1.002p0,
          0x1.003p0,
          0x1.006p0,
          0x1.01p0,
          0x1.03p0,
          0x1.0010000001p0,
          0x1.0030000000001p0,
          0x1.000001p0,
          0x1.ffdp0,
          0x1.fffp0,
          0x1.ffp0,
          0x1.fffffffffffffp0}) {
      numbers.push_back(std::ldexp(digits, exponent));
      numbers.push_back(-numbers.back());
    }
  }
  for (const ScalarKind kind : kKinds) {
    numbers.push_back(largest_value(kind));
    numbers.push_back(largest_value(kind) * (1 + 0x1p-13));
    numbers.push_back(smallest_value(kind) / 2);
    numbers.push_back(smallest_value(kind) * 1.5);
  }
  return numbers;
}

TEST(AdasumWire, RoundsAwkwardNumbersAlike) {
  const std::vector<double> numbers = awkward_numbers();
  const auto size = static_cast<int64_t>(numbers.size());
  for (const ScalarKind from : kKinds) {
    Stack stack(1, size, from);
    for (int64_t e = 0; e < size; ++e) {
      stack.set(0, e, numbers[e]);
    }
    for (const ScalarKind to : kKinds) {
      for (const double factor :
           {1.0, 0x1p-9, 0x1p20, 0x1p-120, 0x1p120, 0x1p-140, 0x1p140, 1.7}) {
        std::vector<char> want(size * size_of(to));
        for (int64_t e = 0; e < size; ++e) {
          set_value(want.data(), e, to, factor * stack.at(0, e));
        }
        for (const AdasumKernels* kernels : all_kernels()) {
          std::vector<char> got(want.size());
          kernels->rescale(stack.row(0), from, size, factor, got.data(), to);
          EXPECT_EQ(differing(got, want, to), "");
        }
      }
    }
  }
}

TEST(AdasumWire, FindsTheLargestFiniteNumber) {
  for (const ScalarKind kind : kKinds) {
    for (const int64_t size : kSizes) {
      Stack stack = Stack::random(1, size, kind);
      stack.set(0, size / 2, -1000.0);
      for (const AdasumKernels* kernels : all_kernels()) {
        const Largest plain = kernels->largest(stack.row(0), kind, size);
        EXPECT_EQ(plain.finite, 1000.0);
        EXPECT_TRUE(plain.all_finite);
      }
      for (const double value : {kInfinity, -kInfinity, kNan}) {
        stack.set(0, 0, value);
        for (const AdasumKernels* kernels : all_kernels()) {
          const Largest other = kernels->largest(stack.row(0), kind, size);
          EXPECT_EQ(other.finite, size > 1 ? 1000.0 : 0.0);
          EXPECT_FALSE(other.all_finite);
        }
      }
    }
  }
}

TEST(AdasumHash, IsTheSameForEveryInstructionSet) {
  const Stack stack = Stack::random(1, 1000, ScalarKind::kFloat32);
  std::vector<char> data(4000);
  std::memcpy(data.data(), stack.tile().rows[0], data.size());
  for (const int64_t last : {3, 8, 100, 499}) {
    uint64_t want = 0;
    for (int64_t word = 3; word < last; ++word) {
      uint64_t bits = 0;
      std::memcpy(&bits, data.data() + word * 8, sizeof(bits));
      want += hash_word(bits, word);
    }
    for (const AdasumKernels* kernels : all_kernels()) {
      EXPECT_EQ(kernels->hash(data.data(), 3, last), want);
    }
  }
}

TEST(AdasumScales, ExponentsAreThoseOfFrexp) {
  for (const double x :
       {1.0, 0.75, 2.0, 3e300, 5e-324, 0x1p-1022, 0x1.8p-1030, -7.0}) {
    int want = 0;
    std::frexp(x, &want);
    EXPECT_EQ(exponent_of(x), want) << x;
  }
  EXPECT_EQ(exponent_of(0.0), kNoExponent);
  for (const int k : {-1022, -1, 0, 5, 1023}) {
    EXPECT_EQ(power_of_two(k), std::ldexp(1.0, k));
  }
}

TEST(AdasumScales, SecondPassIsForWhatLeavesTheRange) {
  const auto asks = [](double square, bool float32) {
    return needs_second_pass(&square, 1, float32);
  };
  EXPECT_FALSE(asks(1.0, false));
  EXPECT_FALSE(asks(0x1p-900, false));
  EXPECT_TRUE(asks(0x1p-901, false));
  EXPECT_TRUE(asks(0x1p901, false));
  EXPECT_TRUE(asks(0.0, false));
  EXPECT_TRUE(asks(kNan, false));
  EXPECT_TRUE(asks(kInfinity, true));
  EXPECT_TRUE(asks(1e-31, true));
  EXPECT_TRUE(asks(1e31, true));
  EXPECT_FALSE(asks(1e30, true));
}

} // namespace
