// SPDX-License-Identifier: Apache-2.0
// Cuts layers into contiguous stages such that the largest is as small as can
// be.
#include <planner/planning.h>

#include <simulator/check_costs.h>

#include <algorithm>
#include <limits>

namespace torch_sm3::pipeline {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

[[noreturn]] void refuse(
    const std::string& expected,
    const std::string& got,
    const char* argument) {
  throw std::invalid_argument(
      "partition: expected " + expected + ", but got " + got + " (argument '" +
      argument + "')");
}

void check_values(const std::vector<double>& values, const char* argument) {
  for (const double value : values) {
    if (!(value >= 0 && value <= kMostCost)) {
      refuse(
          "values from 0 to " + short_number(kMostCost),
          short_number(value),
          argument);
    }
  }
}

void check(
    const std::vector<double>& costs,
    int64_t stages,
    const std::vector<double>& memory,
    double limit) {
  check_values(costs, "costs");
  check_values(memory, "memory");
  check_values({limit}, "limit");
  if (stages < 1 || static_cast<size_t>(stages) > costs.size()) {
    refuse(
        "stages from 1 to the number of layers, " +
            std::to_string(costs.size()),
        std::to_string(stages),
        "stages");
  }
  if (!memory.empty() && memory.size() != costs.size()) {
    refuse(
        "memory of each of " + std::to_string(costs.size()) + " layers",
        std::to_string(memory.size()),
        "memory");
  }
  if (memory.empty() && limit > 0) {
    refuse("memory of each layer beside a limit", "none", "memory");
  }
}

// With a zero in front: stages are differences of these.
std::vector<double> sums(const std::vector<double>& values) {
  std::vector<double> out(values.size() + 1);
  for (size_t i = 0; i < values.size(); ++i) {
    out[i + 1] = out[i] + values[i];
  }
  return out;
}

// The best cut of the first n layers into k stages, for all n and one k after
// the other. Its largest stage grows with n, and the last stage shrinks with
// its first layer; so the best first layer is where the two cross.
class Cut {
 public:
  Cut(const std::vector<double>& costs,
      const std::vector<double>& memory,
      double limit)
      : layers_(costs.size()),
        costs_(sums(costs)),
        memory_(sums(memory)),
        limit_(limit) {}

  // First layer of each stage; empty if no cut keeps the limit.
  std::vector<int64_t> best(size_t stages) {
    std::vector<std::vector<uint32_t>> firsts;
    std::vector<double> largest(layers_ + 1, kInfinite);
    largest[0] = 0;
    for (size_t k = 1; k <= stages; ++k) {
      std::vector<double> next(layers_ + 1, kInfinite);
      std::vector<uint32_t> first(layers_ + 1, 0);
      for (size_t n = k; n <= layers_; ++n) {
        first[n] = last_stage(largest, k, n);
        next[n] = std::max(largest[first[n]], stage(first[n], n));
      }
      largest = std::move(next);
      firsts.push_back(std::move(first));
    }
    if (largest[layers_] == kInfinite) {
      return {};
    }
    std::vector<int64_t> out(stages);
    size_t end = layers_;
    for (size_t k = stages; k-- > 0;) {
      end = firsts[k][end];
      out[k] = static_cast<int64_t>(end);
    }
    return out;
  }

 private:
  // Cost of a stage of the layers from `first` up to `last`.
  double stage(size_t first, size_t last) const {
    const bool fits = memory_.size() == 1 || limit_ == 0 ||
                      memory_[last] - memory_[first] <= limit_;
    return fits ? costs_[last] - costs_[first] : kInfinite;
  }

  uint32_t
  last_stage(const std::vector<double>& largest, size_t k, size_t n) const {
    size_t low = k - 1;
    size_t high = n - 1;
    while (low < high) {
      const size_t middle = low + (high - low) / 2;
      if (largest[middle] >= stage(middle, n)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const auto value = [&](size_t first) {
      return std::max(largest[first], stage(first, n));
    };
    const bool before = low > k - 1 && value(low - 1) <= value(low);
    return static_cast<uint32_t>(before ? low - 1 : low);
  }

  size_t layers_;
  std::vector<double> costs_;
  std::vector<double> memory_;
  double limit_;
};

double
largest(const std::vector<double>& values, const std::vector<int64_t>& firsts) {
  const std::vector<double> before = sums(values);
  double most = 0;
  for (size_t k = 0; k < firsts.size(); ++k) {
    const auto first = static_cast<size_t>(firsts[k]);
    const size_t end = k + 1 < firsts.size()
                           ? static_cast<size_t>(firsts[k + 1])
                           : values.size();
    most = std::max(most, before[end] - before[first]);
  }
  return most;
}

} // namespace

std::vector<int64_t> partition(
    const std::vector<double>& costs,
    int64_t stages,
    const std::vector<double>& memory,
    double limit) {
  check(costs, stages, memory, limit);
  const auto count = static_cast<size_t>(stages);
  std::vector<int64_t> firsts = Cut(costs, memory, limit).best(count);
  if (firsts.empty()) {
    // The smallest limit is that of the cut whose largest stage, in bytes, is
    // as small as can be.
    const double needed = largest(memory, Cut(memory, {}, 0).best(count));
    throw ScheduleError(
        "partition: expected a limit of at least " + short_number(needed) +
        " bytes, but got " + short_number(limit) + " (argument 'limit')");
  }
  // Of the cuts that are as good, the one that needs least memory.
  return memory.empty()
             ? firsts
             : Cut(memory, costs, largest(costs, firsts)).best(count);
}

} // namespace torch_sm3::pipeline
