// SPDX-License-Identifier: Apache-2.0
// Contiguous cuts of layers, against all cuts there are.
#include <torch_sm3/pipeline/planner.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>

namespace torch_sm3::pipeline {
namespace {

double sum(const std::vector<double>& values, int64_t first, int64_t last) {
  return std::accumulate(
      values.begin() + first, values.begin() + last, double{0});
}

double
largest(const std::vector<double>& values, const std::vector<int64_t>& firsts) {
  double most = 0;
  for (size_t k = 0; k < firsts.size(); ++k) {
    const auto end = k + 1 < firsts.size()
                         ? firsts[k + 1]
                         : static_cast<int64_t>(values.size());
    most = std::max(most, sum(values, firsts[k], end));
  }
  return most;
}

// The smallest largest stage over all cuts that keep the limit, and of those
// with it the least memory; else -1.
std::pair<double, double> by_trial(
    const std::vector<double>& costs,
    int64_t stages,
    const std::vector<double>& memory,
    double limit) {
  std::pair<double, double> best{-1, -1};
  std::vector<int64_t> firsts{0};
  const auto layers = static_cast<int64_t>(costs.size());
  const auto extend = [&](const auto& self) -> void {
    if (static_cast<int64_t>(firsts.size()) == stages) {
      const std::pair found(
          largest(costs, firsts), memory.empty() ? 0 : largest(memory, firsts));
      if ((limit == 0 || found.second <= limit) &&
          (best.first < 0 || found < best)) {
        best = found;
      }
      return;
    }
    for (int64_t next = firsts.back() + 1; next < layers; ++next) {
      firsts.push_back(next);
      self(self);
      firsts.pop_back();
    }
  };
  extend(extend);
  return best;
}

TEST(Partition, IsAsGoodAsTheBestOfAllCuts) {
  std::mt19937 random(1);
  int refused = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const size_t layers = 1 + random() % 9;
    const auto stages = static_cast<int64_t>(1 + random() % layers);
    std::vector<double> costs(layers);
    std::vector<double> memory(trial % 2 == 0 ? 0 : layers);
    for (double& value : costs) {
      value = random() % 6;
    }
    for (double& value : memory) {
      value = random() % 6;
    }
    const double limit = trial % 4 == 1 ? 1 + random() % 12 : 0;
    const auto [best, bytes] = by_trial(costs, stages, memory, limit);
    if (best < 0) {
      ++refused;
      EXPECT_THROW(partition(costs, stages, memory, limit), ScheduleError);
      continue;
    }
    const auto firsts = partition(costs, stages, memory, limit);
    ASSERT_EQ(firsts.size(), static_cast<size_t>(stages));
    EXPECT_EQ(firsts[0], 0);
    // Ascending: every layer is on exactly one stage, and no stage is empty.
    EXPECT_EQ(
        std::adjacent_find(firsts.begin(), firsts.end(), std::greater_equal{}),
        firsts.end());
    EXPECT_LT(firsts.back(), static_cast<int64_t>(layers));
    EXPECT_EQ(largest(costs, firsts), best);
    if (!memory.empty()) {
      EXPECT_EQ(largest(memory, firsts), bytes);
    }
  }
  EXPECT_GT(refused, 0);
}

TEST(Partition, HeadAndEmbeddingCountAsLayers) {
  const std::vector<double> costs{3, 1, 1, 1, 1, 1, 1, 5};
  const auto firsts = partition(costs, 3);
  EXPECT_EQ(firsts.back(), 7);
  EXPECT_EQ(largest(costs, firsts), 5);
}

TEST(Partition, NamesTheSmallestLimitThatFits) {
  try {
    partition({1, 1, 1, 1}, 2, {5, 1, 1, 4}, 5.5);
    FAIL();
  } catch (const ScheduleError& error) {
    EXPECT_STREQ(
        error.what(),
        "partition: expected a limit of at least 6 bytes, but got 5.5 "
        "(argument 'limit')");
  }
  EXPECT_EQ(
      partition({1, 1, 1, 1}, 2, {5, 1, 1, 4}, 6),
      (std::vector<int64_t>{0, 2}));
}

TEST(Partition, RefusesWhatCannotBeCut) {
  const auto refusal = [](const auto&... arguments) -> std::string {
    try {
      partition(arguments...);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "none";
  };
  const std::vector<double> two{1, 2};
  EXPECT_EQ(
      refusal(two, 3),
      "partition: expected stages from 1 to the number of layers, 2, but got 3 "
      "(argument 'stages')");
  EXPECT_NE(refusal(two, 0).find("but got 0"), std::string::npos);
  EXPECT_NE(
      refusal(std::vector<double>{1, -2}, 1)
          .find("but got -2 (argument 'costs"),
      std::string::npos);
  EXPECT_NE(
      refusal(two, 1, std::vector<double>{1}, 1.0).find("(argument 'memory')"),
      std::string::npos);
  EXPECT_NE(
      refusal(two, 1, two, -1.0).find("(argument 'limit')"), std::string::npos);
  EXPECT_EQ(
      refusal(two, 1, std::vector<double>{}, 3.0),
      "partition: expected memory of each layer beside a limit, but got none "
      "(argument 'memory')");
}

TEST(Partition, ManyLayersAreCutAtOnce) {
  std::mt19937 random(2);
  std::vector<double> costs(4000);
  for (double& value : costs) {
    value = 1 + random() % 100;
  }
  const auto firsts = partition(costs, 200);
  const double share = sum(costs, 0, 4000) / 200;
  EXPECT_GE(largest(costs, firsts), share);
  EXPECT_LE(largest(costs, firsts), share + 100);
}

} // namespace
} // namespace torch_sm3::pipeline
