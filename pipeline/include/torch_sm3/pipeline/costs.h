// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

/// \file
/// What the actions of a schedule cost: for the planner's search, the
/// verifier's memory check and the simulator. Times are in any one unit, memory
/// in bytes.

namespace torch_sm3::pipeline {

/// Costs of one stage.
struct StageCosts {
  double forward = 1;
  double input = 1;  ///< I: gradients of the inputs
  double weight = 1; ///< W: gradients of the weights
  /// What a backward computes once more before anything else: time of I beside
  /// `input`. A B or pair that is given holds its own.
  double recompute = 0;
  /// B; recompute + input + weight if not given.
  std::optional<double> backward;
  /// A pair (F;B)OVERLAP_F_B of which this stage runs the F in one call; if not
  /// given, the two run one after the other, and what the F sends leaves at its
  /// end.
  std::optional<double> pair;
  double reduce = 0;    ///< REDUCE_GRAD
  double optimizer = 0; ///< share of OPTIM
  /// Kept from F to B or W; without a backward given back when F ends.
  double activation_bytes = 0;
  /// Part of it that I lets go of; negative where I keeps more for W, such as
  /// the gradients that entered layers, than it lets go of.
  double released_at_input = 0;
  /// Part of it that is the stage's output as well, such as the result of a
  /// tanh, and in use once.
  double shared_bytes = 0;
  /// The stage's output: message forward, and its gradient back.
  double boundary_bytes = 0;
  /// In use only while a forward or backward of the stage runs.
  double transient_bytes = 0;
  /// Parameters, gradients, optimizer state.
  double static_bytes = 0;

  double input_gradient() const {
    return recompute + input;
  }
  double full_backward() const {
    return backward.value_or(input_gradient() + weight);
  }
};

/// Costs of a whole pipeline.
struct Costs {
  /// Of each stage; one entry stands for all stages.
  std::vector<StageCosts> stages{StageCosts{}};
  /// Bytes that travel each route of the schedule, forward and back; one entry
  /// stands for all.
  std::vector<double> route_bytes{0};
  /// Time from SEND to arrival: [p * p] by sender, then receiver; [p] by
  /// sender; or one entry for all links. Stages of one rank exchange no
  /// message.
  std::vector<double> latency{0};
  /// Bytes per unit of time in the same form; 0 is without limit.
  std::vector<double> bandwidth{0};
  /// A directed link carries one message at a time.
  bool serial_links = false;
  /// Of each rank, relative; one entry stands for all. Divides the time of
  /// forwards, backwards and OPTIM.
  std::vector<double> speed{1};
  /// Each forward and backward takes up to this much longer, relative; the same
  /// in every run with one seed.
  double jitter = 0;
  uint64_t seed = 0;
  /// TIE_REDUCE; of each tie, one entry stands for all.
  std::vector<double> tie{0};
  /// No rank starts OPTIM before all ranks have come to it, as when gradients
  /// are clipped by their norm.
  bool optimizer_waits = false;

  const StageCosts& of(uint32_t stage) const {
    return stages.size() == 1 ? stages[0] : stages[stage];
  }
  double of_route(uint32_t route) const {
    return route_bytes.size() == 1 ? route_bytes[0] : route_bytes[route];
  }
  double of_rank(uint32_t rank) const {
    return speed.size() == 1 ? speed[0] : speed[rank];
  }
};

/// How messages are posted and matched.
enum class Links : uint8_t {
  kPosted,     ///< a SEND never waits
  kRendezvous, ///< a rank with `max_pending` unmatched sends on a link waits
  kBlocking,   ///< a rank waits at each SEND until it is matched
};

/// The links of a pipeline.
struct LinkModel {
  Links links = Links::kRendezvous;
  int64_t max_pending = 1;
};

} // namespace torch_sm3::pipeline
