// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch_sm3/pipeline/stage.h>
#include <torch_sm3/pipeline/transport.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace torch_sm3::pipeline {

// A stage that holds a tied weight, as all ranks know it.
struct Member {
  int64_t stage = 0;
  int64_t rank = 0;
  std::string shape; // and dtype, as text
  at::Tensor weight; // where it is on this rank
};

// Members of each tied weight by its name; in stage order once all ranks' are
// put together.
using Members = std::map<std::string, std::vector<Member>>;

// What this rank holds of each tied weight.
Members members_of(const std::vector<Stage>& stages, int64_t rank);

// Puts the members of all ranks, in rank order, together. A ValueError if
// shapes or dtypes differ.
Members combined(const std::vector<Members>& all);

// The stages of each tied weight, each once and in order.
std::vector<uint16_t> stages_of(const std::vector<Member>& members);

// One tied weight with members on this rank: equal at the start, and one summed
// gradient for all once per step.
class Tie {
 public:
  // `transport` may be null if all members are on this rank.
  Tie(Channel channel,
      const std::vector<Member>& members,
      int64_t rank,
      Transport* transport);

  // Gives all members the bits of the one on the lowest stage.
  void broadcast() const;
  // Gives all members the sum of their gradients, added in stage order. A rank
  // that failed takes part in agreeing only. Throws PeerFailedError if another
  // member's rank has failed, and LinksLost.
  void reduce(bool failed) const;

  // The lowest member stage on this rank.
  int64_t stage() const;
  // Members on this rank whose norm counts on another one's account.
  std::vector<at::Tensor> repeated() const;

 private:
  void tell(int64_t rank, const c10::IValue& value) const;
  c10::IValue hear(int64_t rank) const;
  std::vector<at::Tensor> own() const;
  at::Tensor
  sum(const std::map<int64_t, std::vector<c10::IValue>>& gradients) const;

  const Channel channel_;
  const int64_t rank_;
  Transport* const transport_;
  int64_t root_;
  std::vector<Member> members_; // one tensor in several stages of a rank: once
  std::map<int64_t, int64_t> first_; // stage, by rank
};

} // namespace torch_sm3::pipeline
