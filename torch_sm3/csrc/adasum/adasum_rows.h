// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// The leaves of all members for the tiles that this rank combines.

#include "adasum_stage.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace torch_sm3::distributed {

/// Equal pieces of the scratch memory.
class Slots {
 public:
  Slots(at::Tensor memory, int64_t bytes);

  size_t count() const {
    return in_use_.size();
  }
  bool any_free() const;
  /// A free slot; there must be one.
  size_t take();
  void give_back(size_t slot) {
    in_use_[slot] = false;
  }
  at::Tensor memory(size_t slot) const {
    return memory_.narrow(0, static_cast<int64_t>(slot) * bytes_, bytes_);
  }

 private:
  at::Tensor memory_;
  int64_t bytes_;
  std::vector<bool> in_use_;
};

/// How a slot is used, in bytes.
struct SlotPlan {
  explicit SlotPlan(const StageContext& context);

  int64_t result;  ///< own coded result, at the beginning
  int64_t message; ///< largest message of leaves, aligned
  int64_t coded;   ///< number of coded messages that leave from the slot
  int64_t total;
};

/// Exchanges leaves, keeps them, drops them.
class RowExchange {
 public:
  RowExchange(const StageContext& context, Slots& slots);

  /// Whether the leaves of a piece are here or on their way.
  bool has(size_t piece) const {
    return states_[piece].slot != kNone;
  }
  /// Starts the exchange of a piece; a slot must be free.
  void post(size_t piece);
  /// The leaves of a piece, which must have been posted; waits for them.
  const Rows& wait(size_t piece);
  /// Drops the leaves of the last piece that has arrived, is not `keep` and is
  /// not ready before piece `horizon`; whether there was one.
  bool drop_one(size_t keep, size_t horizon);
  size_t slot(size_t piece) const {
    return states_[piece].slot;
  }
  /// Forgets the leaves; the slot is the caller's.
  size_t release(size_t piece);

 private:
  static constexpr size_t kNone = SIZE_MAX;

  struct State {
    size_t slot = kNone;
    int64_t turn = 0; // how often it was exchanged
    Rows rows;
    std::vector<at::Tensor> scales; // of coded rows
    std::unique_ptr<Transport::Posted> posted;
  };

  void post_plain(size_t piece, State& state);
  void post_coded(size_t piece, State& state);

  const StageContext& context_;
  const SlotPlan plan_;
  Slots& slots_;
  std::vector<State> states_;
};

} // namespace torch_sm3::distributed
