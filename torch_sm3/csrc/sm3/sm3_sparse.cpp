// SPDX-License-Identifier: Apache-2.0
#include <sm3_sparse.h>

#include <c10/util/irange.h>

#include <algorithm>

namespace torch_sm3 {
namespace {

// What one accumulator has to do with dimension 0, whose indices are "rows".
struct Role {
  bool holds_rows;  // some axis of dimension 0 is its own
  bool within_rows; // each set lies in one row
};

Role role_of(const SM3Geometry& g, const SM3Group& group, int64_t rows) {
  const int64_t row = rows > 0 ? g.numel / rows : 0; // elements of one
  Role role{false, true};
  int64_t after = 1;
  for (size_t axis = g.view.size(); axis-- > 0;) {
    const int64_t from = after;
    after *= g.view[axis];
    if (after == from) {
      continue;
    }
    role.holds_rows |= after > row && group.strides[axis] != 0;
    if (group.strides[axis] == 0) {
      // A set may spread over all elements from here on: of the outermost such
      // axis, which comes last.
      role.within_rows = row % after == 0;
    }
  }
  return role;
}

} // namespace

std::vector<SM3SparseGroup> sm3_sparse_groups(
    const SM3Geometry& g,
    const SM3Hyperparameters& h,
    int64_t rows,
    int64_t sparse_dims) {
  const bool assigns = h.beta2 < 1 && !h.keep_larger;
  std::vector<SM3SparseGroup> groups;
  size_t first = g.groups.size();
  for (const auto i : c10::irange(g.groups.size())) {
    const Role role = role_of(g, g.groups[i], rows);
    const bool alone = sparse_dims == 1 && role.within_rows;
    groups.push_back({i, alone, assigns && alone});
    first = role.holds_rows ? std::min(first, i) : first;
  }
  if (h.rows_only) {
    return {groups[first == groups.size() ? 0 : first]};
  }
  return groups;
}

} // namespace torch_sm3
