// SPDX-License-Identifier: Apache-2.0
#include <simulator/check_costs.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
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
    for (const size_t size : sizes) {
      if (got == size) {
        return;
      }
      expected += (expected.empty() ? "" : " or ") + std::to_string(size);
    }
    fail(expected + " entries", std::to_string(got), argument);
  }

  void cost(double value, const char* argument) const {
    if (!std::isfinite(value) || value < 0) {
      fail("finite costs >= 0", std::to_string(value), argument);
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
      !std::isfinite(costs.released_at_input)) {
    check.fail(
        "at most activation_bytes, " + std::to_string(costs.activation_bytes),
        std::to_string(costs.released_at_input),
        "released_at_input");
  }
  check.cost(costs.shared_bytes, "shared_bytes");
  const double most = std::min(costs.activation_bytes, costs.boundary_bytes);
  if (costs.shared_bytes > most) {
    check.fail(
        "at most activation_bytes and boundary_bytes, " + std::to_string(most),
        std::to_string(costs.shared_bytes),
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
  check.costs(costs.bandwidth, "bandwidth");
  check.size(costs.speed.size(), {1, p}, "speed");
  for (const double speed : costs.speed) {
    if (!std::isfinite(speed) || speed <= 0) {
      check.fail("finite speeds > 0", std::to_string(speed), "speed");
    }
  }
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

void check_links(const char* op, LinkModel links) {
  if (links.links == Links::kRendezvous && links.max_pending < 1) {
    Checker(op).fail(
        "max_pending >= 1", std::to_string(links.max_pending), "max_pending");
  }
}

} // namespace torch_sm3::pipeline
