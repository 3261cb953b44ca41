// SPDX-License-Identifier: Apache-2.0
#include <scalar_math.h>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace torch_sm3 {
namespace {

TEST(ScalarMath, WidensEverySixteenBitPatternAsTorchDoes) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const auto pattern = static_cast<uint16_t>(bits);
    const float half = c10::Half(pattern, c10::Half::from_bits());
    const float bfloat = c10::BFloat16(pattern, c10::BFloat16::from_bits());
    if (std::isnan(half)) {
      EXPECT_TRUE(std::isnan(to_float(Half{pattern})));
    } else {
      EXPECT_EQ(float_bits(half), float_bits(to_float(Half{pattern}))) << bits;
    }
    if (!std::isnan(bfloat)) {
      EXPECT_EQ(float_bits(bfloat), float_bits(to_float(BFloat16{pattern})));
    }
  }
}

TEST(ScalarMath, NarrowsAsTorchDoes) {
  uint32_t bits = 1;
  for (int i = 0; i < 2'000'000; ++i) {
    bits = bits * 1664525u + 1013904223u;
    const float value = float_from_bits(bits);
    if (std::isnan(value)) {
      continue;
    }
    Half half;
    BFloat16 bfloat;
    round_to(value, &half);
    round_to(value, &bfloat);
    ASSERT_EQ(half.bits, c10::Half(value).x) << value;
    ASSERT_EQ(bfloat.bits, c10::BFloat16(value).x) << value;
  }
}

// The nearest of the two neighbours in T, ties to even, by trial.
template <class T>
uint16_t nearest(double value) {
  T guess;
  round_to(static_cast<float>(value), &guess);
  uint16_t best = guess.bits;
  for (int step = -1; step <= 1; ++step) {
    const T other{static_cast<uint16_t>(guess.bits + step)};
    const double now = std::abs(to_double(T{best}) - value);
    const double then = std::abs(to_double(other) - value);
    if (then < now || (then == now && (other.bits & 1u) == 0u)) {
      best = other.bits;
    }
  }
  return best;
}

TEST(ScalarMath, RoundsDoublesOnce) {
  // Exactly between two values of the type plus what float32 cannot see.
  for (const double tail : {-1e-12, 0.0, 1e-12}) {
    for (int i = 1; i < 4000; ++i) {
      const double bfloat_tie =
          (1.0 + (2 * (i % 128) + 1) / 256.0) * (1 + tail);
      const double half_tie =
          (1.0 + (2 * (i % 1024) + 1) / 2048.0) * (1 + tail);
      BFloat16 bfloat;
      Half half;
      round_to(bfloat_tie, &bfloat);
      round_to(half_tie, &half);
      ASSERT_EQ(bfloat.bits, nearest<BFloat16>(bfloat_tie)) << i << " " << tail;
      ASSERT_EQ(half.bits, nearest<Half>(half_tie)) << i << " " << tail;
    }
  }
  Half half;
  round_to(65519.9999, &half);
  EXPECT_EQ(half.bits, 0x7bff);
  round_to(std::numeric_limits<double>::quiet_NaN(), &half);
  EXPECT_TRUE(std::isnan(to_float(half)));
}

} // namespace
} // namespace torch_sm3
