// SPDX-License-Identifier: Apache-2.0
// Plans over links: what takes time on them, and how many sends may wait.
#include <pipeline_costs.h>

#include <torch_sm3/pipeline/planner.h>
#include <torch_sm3/pipeline/simulator.h>

#include <gtest/gtest.h>

#include <stdexcept>

namespace torch_sm3::pipeline {
namespace {

TEST(PlannerLinks, WarmUpHidesTheLinks) {
  // Bubble (p - 1) T + 2 c (p - 1), where classic 1F1B waits in every round.
  for (const int64_t p : {2, 3, 4, 5, 8}) {
    for (const double link : {0.1, 0.5, 1.0, 1.5, 2.0, 4.0}) {
      for (int64_t m = 1; m <= 4 * p; ++m) {
        PlanOptions options{.kind = "1f1b", .ranks = p, .microbatches = m};
        options.link_cost = link;
        Costs costs;
        costs.latency = {link};
        const double found = simulate(plan(options), costs).makespan;
        const double expected =
            3.0 * (m + p - 1) + 2 * link * static_cast<double>(p - 1);
        EXPECT_NEAR(found, expected, 1e-9)
            << "p=" << p << " m=" << m << " c=" << link;
        options.link_cost = 0;
        EXPECT_GE(simulate(plan(options), costs).makespan, expected - 1e-9);
      }
    }
  }
}

// Whether a backward is short or long, one send pending on each link is as good
// as any number.
TEST(PlannerLinks, OnePendingSendHoldsUpNobody) {
  const double triples[][3]{
      {1, 1, 1}, {1, 2, 1}, {3, 4, 2}, {1, 3, 2}, {5, 1, 1}};
  for (const std::string& kind : kinds()) {
    for (const int64_t p : {2, 3, 4, 8}) {
      for (int64_t v = 1; v <= 4 && kind != "auto"; ++v) {
        for (int64_t m = 1; m <= 4 * p; ++m) {
          Schedule schedule;
          try {
            schedule = plan({kind, p, m, v}).lower();
          } catch (const std::invalid_argument&) {
            continue; // not of this kind
          }
          for (const auto& [f, i, w] : triples) {
            const Costs costs = stage_costs(f, i, w);
            const double any =
                simulate(schedule, costs, {Links::kPosted, 1}).makespan;
            EXPECT_NEAR(simulate(schedule, costs).makespan, any, 1e-9 * any)
                << kind << " p=" << p << " v=" << v << " m=" << m
                << " B/F=" << (i + w) / f;
          }
        }
      }
    }
  }
}

// As a runner has by default: however long its parts take, no plan is held up.
TEST(PlannerLinks, TwoPendingSendsHoldUpNobodyWhateverTheCosts) {
  const double triples[][3]{
      {1, 1, 4}, {1, 2, 9}, {9, 1, 1}, {1, 9, 1}, {4, 1, 9}, {1, 30, 30}};
  for (const std::string& kind : kinds()) {
    for (const int64_t p : {2, 3, 5, 8}) {
      for (int64_t m = 1; m <= 4 * p && kind != "auto"; ++m) {
        Schedule schedule;
        try {
          schedule = plan({kind, p, m}).lower();
        } catch (const std::invalid_argument&) {
          continue; // not of this kind
        }
        for (const auto& [f, i, w] : triples) {
          const Costs costs = stage_costs(f, i, w);
          const double any =
              simulate(schedule, costs, {Links::kPosted, 1}).makespan;
          const double two =
              simulate(schedule, costs, {Links::kRendezvous, 2}).makespan;
          EXPECT_NEAR(two, any, 1e-9 * any)
              << kind << " p=" << p << " m=" << m << " " << f << i << w;
        }
      }
    }
  }
}

} // namespace
} // namespace torch_sm3::pipeline
