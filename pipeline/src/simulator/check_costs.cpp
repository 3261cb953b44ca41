// SPDX-License-Identifier: Apache-2.0
#include <simulator/check_costs.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>

namespace torch_sm3::pipeline {
namespace {

class Checker {
 public:
  explicit Checker(const char* op) : op_(op) {}

  [[noreturn]] void fail(
      const std::string& expected,
      const std::string& got,
      const char* argument) const {
    throw std::invalid_argument(
        std::string(op_) + ": expected " + expected + ", but got " + got +
        " (argument '" + argument + "')");
  }

  // `sizes` in ascending order.
  void size(
      size_t got,
      std::initializer_list<size_t> sizes,
      const char* argument) const {
    std::string expected;
    size_t last = 0;
    for (const size_t size : sizes) {
      if (got == size) {
        return;
      }
      if (size > last) {
        expected += (last == 0 ? "" : " or ") + std::to_string(size);
        last = size;
      }
    }
    fail(expected + " entries", std::to_string(got), argument);
  }

  void cost(double value, const char* argument) const {
    if (!(value >= 0 && value <= kMostCost)) {
      fail(
          "costs from 0 to " + short_number(kMostCost),
          short_number(value),
          argument);
    }
  }

  void costs(const std::vector<double>& values, const char* argument) const {
    for (const double value : values) {
      cost(value, argument);
    }
  }

 private:
  const char* op_;
};

// What divides a cost is neither zero nor so small that the result overflows.
void check_divisors(
    const Checker& check,
    const std::vector<double>& values,
    const char* argument) {
  for (const double value : values) {
    if (!(value >= kLeastDivisor && value <= kMostCost)) {
      check.fail(
          std::string(argument) + " from " + short_number(kLeastDivisor) +
              " to " + short_number(kMostCost),
          short_number(value),
          argument);
    }
  }
}

void check_stage(const Checker& check, const StageCosts& costs) {
  check.cost(costs.forward, "forward");
  check.cost(costs.input, "input");
  check.cost(costs.weight, "weight");
  check.cost(costs.recompute, "recompute");
  check.cost(costs.backward.value_or(0), "backward");
  check.cost(costs.pair.value_or(0), "pair");
  check.cost(costs.reduce, "reduce");
  check.cost(costs.optimizer, "optimizer");
  check.cost(costs.activation_bytes, "activation_bytes");
  check.cost(costs.boundary_bytes, "boundary_bytes");
  check.cost(costs.transient_bytes, "transient_bytes");
  check.cost(costs.static_bytes, "static_bytes");
  // Negative where I makes more than it lets go of.
  if (!(costs.released_at_input <= costs.activation_bytes) ||
      costs.released_at_input < -kMostCost) {
    check.fail(
        "at most activation_bytes, " + short_number(costs.activation_bytes),
        short_number(costs.released_at_input),
        "released_at_input");
  }
  check.cost(costs.shared_bytes, "shared_bytes");
  const double most = std::min(costs.activation_bytes, costs.boundary_bytes);
  if (costs.shared_bytes > most) {
    check.fail(
        "at most activation_bytes and boundary_bytes, " + short_number(most),
        short_number(costs.shared_bytes),
        "shared_bytes");
  }
}

} // namespace

void check_costs(const char* op, const Schedule& schedule, const Costs& costs) {
  const Checker check(op);
  const size_t p = schedule.ranks;
  check.size(costs.stages.size(), {1, schedule.stages}, "stages");
  for (const StageCosts& stage : costs.stages) {
    check_stage(check, stage);
  }
  check.size(costs.latency.size(), {1, p, p * p}, "latency");
  check.costs(costs.latency, "latency");
  check.size(costs.bandwidth.size(), {1, p, p * p}, "bandwidth");
  std::vector<double> limited = costs.bandwidth;
  std::erase(limited, 0); // without limit
  check_divisors(check, limited, "bandwidth");
  check.size(costs.speed.size(), {1, p}, "speed");
  check_divisors(check, costs.speed, "speed");
  check.size(
      costs.route_bytes.size(), {1, schedule.routes.size()}, "route_bytes");
  check.costs(costs.route_bytes, "route_bytes");
  check.size(costs.tie.size(), {1, schedule.ties.size()}, "tie");
  check.costs(costs.tie, "tie");
  check.cost(costs.jitter, "jitter");
}

bool has_bytes(const Costs& costs) {
  const auto any = [](const StageCosts& of) {
    return of.activation_bytes != 0 || of.released_at_input != 0 ||
           of.boundary_bytes != 0 || of.transient_bytes != 0 ||
           of.static_bytes != 0;
  };
  const std::vector<double>& routes = costs.route_bytes;
  return std::any_of(costs.stages.begin(), costs.stages.end(), any) ||
         std::any_of(
             routes.begin(), routes.end(), [](double of) { return of != 0; });
}

void check_limits(
    const char* op,
    const std::vector<double>& limits,
    size_t ranks) {
  const Checker check(op);
  if (limits.size() > 1 && limits.size() != ranks) {
    check.fail(
        "1 or " + std::to_string(ranks) + " memory limits",
        std::to_string(limits.size()),
        "memory_limit");
  }
  for (const double limit : limits) {
    if (!(limit >= 0)) {
      check.fail(
          "a memory limit of 0 or more", short_number(limit), "memory_limit");
    }
  }
}

double limit_of(const std::vector<double>& limits, size_t rank) {
  if (limits.empty()) {
    return std::numeric_limits<double>::infinity();
  }
  return limits.size() == 1 ? limits[0] : limits[rank];
}

std::string short_number(double value) {
  std::array<char, 32> buffer{};
  const bool whole = value == std::floor(value) && std::abs(value) < 1e15;
  const auto format =
      whole ? std::chars_format::fixed : std::chars_format::general;
  char* const first = buffer.data();
  return {
      first, std::to_chars(first, first + buffer.size(), value, format).ptr};
}

void check_links(const char* op, LinkModel links) {
  if (links.links == Links::kRendezvous && links.max_pending < 1) {
    Checker(op).fail(
        "max_pending >= 1", std::to_string(links.max_pending), "max_pending");
  }
}

} // namespace torch_sm3::pipeline
