// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The way of the result from its owners to all ranks.

#include "adasum_rows.h"

#include <deque>
#include <memory>
#include <vector>

namespace torch_sm3::distributed {

/// Returns combined pieces: the levels in reverse, at each one all members give
/// what they hold to all others.
class Returns {
 public:
  Returns(const StageContext& context, Slots& slots);

  /// Starts with a piece whose own tiles are in the target and, where results
  /// are coded, at the beginning of `slot`. The slot is given back as soon as
  /// it is not needed any more.
  void post(size_t piece, size_t slot);
  /// Goes on until at most `pending` pieces are on their way.
  void advance(size_t pending);

 private:
  struct Pending {
    size_t piece;
    size_t slot;
    int level;
    std::vector<at::Tensor> messages; // coded, by member
    std::unique_ptr<Transport::Posted> posted;
  };

  void post_level(Pending& pending);
  void post_coded(Pending& pending);
  void finish_level(Pending& pending);
  Range part(const Pending& pending, int rank) const;

  const StageContext& context_;
  Slots& slots_;
  const SlotPlan plan_;
  const bool coded_;
  std::deque<Pending> pending_;
};

} // namespace torch_sm3::distributed
