// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <search/list_scheduler.h>

#include <torch_sm3/pipeline/schedule.h>

#include <cstdint>
#include <vector>

namespace torch_sm3::pipeline {

/// Activations that the ranks of a list hold, and what they have room for.
///
/// Room for what one input gradient keeps more is left free by the forwards; an
/// input gradient that finds it taken has a weight gradient to wait for, which
/// gives it back.
class ListRoom {
 public:
  /// \param shape  the plan's stages and microbatches
  /// \param policy budgets and what takes of them; outlives this
  ListRoom(const Schedule& shape, const ListPolicy& policy);

  /// Whether a rank has room for a forward of this stage, of which `in_flight`
  /// microbatches are held.
  bool for_forward(uint32_t stage, uint32_t in_flight) const;
  /// Whether it has room for what an input gradient of this stage keeps more.
  bool for_input(uint32_t stage) const;

  void forward(uint32_t stage);
  void input(uint32_t stage);
  void weight(uint32_t stage);

 private:
  void share(const Schedule& shape, const std::vector<uint32_t>& own);
  bool fits(uint32_t rank, double more) const;

  const ListPolicy& policy_;
  std::vector<uint32_t> ranks_; // of each stage
  std::vector<double> held_;    // of each rank
  std::vector<double> free_;    // of each stage: for others of its rank
  std::vector<uint32_t> most_;  // of each stage: in flight
};

} // namespace torch_sm3::pipeline
