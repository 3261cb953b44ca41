// SPDX-License-Identifier: Apache-2.0
#pragma once

/// \file
/// Who talks to whom, and who owns which tiles.
///
/// Ranks are numbers of mixed radix, the first digit runs fastest. A level is
/// an exchange among the ranks that differ in one digit only; it leaves each of
/// them with a part of the tiles that it held before:
///
///     radices            algorithm
///     p                  pair, gather, gram
///     q, p / q           two_level; nodes of q ranks
///     2, 2, 2, ...       vhdd

#include "adasum_layout.h"

#include <cstdint>
#include <vector>

namespace torch_sm3::distributed {

/// The `k`-th of `parts` runs into which a run is split, as equal as they can
/// be.
inline Range split(Range run, int64_t parts, int64_t k) {
  return {
      run.first + k * run.size() / parts,
      run.first + (k + 1) * run.size() / parts};
}

/// The place of one rank among all.
class Grid {
 public:
  /// \param radices each at least 2 (or a single 1), their product is the
  /// number
  ///                of ranks
  Grid(std::vector<int> radices, int rank);

  int rank() const {
    return rank_;
  }
  int size() const {
    return strides_.back();
  }
  int levels() const {
    return static_cast<int>(radices_.size());
  }
  int radix(int level) const {
    return radices_[level];
  }
  /// The position of this rank among `members(level)`.
  int digit(int level) const {
    return rank_ / strides_[level] % radices_[level];
  }
  /// Ranks that differ from this one in digit `level` at most, ascending.
  std::vector<int> members(int level) const;
  /// Ranks that agree with this one in all digits from `levels` on: a run.
  Range block(int levels) const;
  /// The part of a run of tiles that `rank` holds after `levels` levels.
  Range owned(Range tiles, int rank, int levels) const;

 private:
  std::vector<int> radices_;
  std::vector<int> strides_; // levels + 1
  int rank_;
};

} // namespace torch_sm3::distributed
