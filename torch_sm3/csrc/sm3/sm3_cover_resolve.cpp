// SPDX-License-Identifier: Apache-2.0
#include <sm3_face.h>
#include <torch_sm3/check.h>

#include <c10/util/accumulate.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace torch_sm3::optim {
namespace {

constexpr int64_t kMaxAxes = 62; // bits of a mask

int64_t dim_of(int64_t dim, size_t rank) {
  const int64_t wrapped = dim < 0 ? dim + static_cast<int64_t>(rank) : dim;
  TORCH_SM3_CHECK_VALUE(
      wrapped >= 0 && wrapped < static_cast<int64_t>(rank),
      "SM3",
      "cover",
      c10::str("a dimension of a parameter of rank ", rank),
      dim);
  return wrapped;
}

// Distinct axes in ascending order, so that equal groups have equal shapes.
std::vector<int64_t> group_of(std::vector<int64_t> group, size_t rank) {
  const auto wrong =
      std::find_if(group.begin(), group.end(), [&](int64_t axis) {
        return axis < 0 || axis >= static_cast<int64_t>(rank);
      });
  TORCH_SM3_CHECK_VALUE(
      wrong == group.end(),
      "SM3",
      "cover",
      c10::str("axes of a view of ", rank, " sizes"),
      *wrong);
  std::sort(group.begin(), group.end());
  return group;
}

Cover::Axes groups_of(const Cover::Axes& axes, size_t rank) {
  Cover::Axes groups;
  for (const auto& group : axes) {
    groups.push_back(group_of(group, rank));
  }
  return groups;
}

std::vector<int64_t> all_axes(size_t rank) {
  std::vector<int64_t> axes(rank);
  std::iota(axes.begin(), axes.end(), 0);
  return axes;
}

Cover::Axes single_axes(size_t rank) {
  Cover::Axes groups;
  for (const int64_t axis : all_axes(rank)) {
    groups.push_back({axis});
  }
  if (groups.empty()) {
    groups.push_back({}); // a scalar has one number
  }
  return groups;
}

bool holds(const std::vector<int64_t>& all, const std::vector<int64_t>& some) {
  return std::includes(all.begin(), all.end(), some.begin(), some.end());
}

// Leaves out groups whose sets only unite those of another: their numbers are
// never the least.
Cover::Axes finest(const Cover::Axes& groups) {
  Cover::Axes kept;
  for (size_t i = 0; i < groups.size(); ++i) {
    bool needed = true;
    for (size_t j = 0; j < groups.size(); ++j) {
      const bool equal = groups[i] == groups[j];
      if (i != j && holds(groups[j], groups[i]) && (!equal || j < i)) {
        needed = false;
      }
    }
    if (needed) {
      kept.push_back(groups[i]);
    }
  }
  return kept;
}

// Size-1 axes go, and with them the groups that are then not needed.
ResolvedCover without_ones(const ResolvedCover& cover) {
  ResolvedCover kept;
  std::vector<int64_t> place(cover.view.size(), -1);
  for (size_t axis = 0; axis < cover.view.size(); ++axis) {
    if (cover.view[axis] != 1) {
      place[axis] = static_cast<int64_t>(kept.view.size());
      kept.view.push_back(cover.view[axis]);
    }
  }
  Cover::Axes groups;
  for (const auto& axes : cover.axes) {
    auto& group = groups.emplace_back();
    for (const int64_t axis : axes) {
      if (place[axis] >= 0) {
        group.push_back(place[axis]);
      }
    }
  }
  kept.axes = finest(groups);
  return kept;
}

ResolvedCover standard_cover(std::vector<int64_t> view) {
  ResolvedCover cover{std::move(view), {}};
  cover.axes = single_axes(cover.view.size());
  return without_ones(cover);
}

ResolvedCover diagonal_cover(at::IntArrayRef shape) {
  ResolvedCover cover = standard_cover(shape.vec());
  cover.axes = {all_axes(cover.view.size())};
  return cover;
}

ResolvedCover auto_cover(at::IntArrayRef shape) {
  ResolvedCover cover = standard_cover(shape.vec());
  const int64_t sum =
      std::accumulate(cover.view.begin(), cover.view.end(), int64_t{0});
  return sum < c10::multiply_integers(cover.view) ? cover
                                                  : diagonal_cover(shape);
}

// Neighbouring dimensions become one.
ResolvedCover merge_cover(const Cover& cover, at::IntArrayRef shape) {
  size_t count = 0;
  std::vector<int64_t> view;
  for (const auto& group : cover.numbers()) {
    count += group.size();
    view.push_back(1);
    for (const int64_t dim : group) {
      view.back() *= dim < static_cast<int64_t>(shape.size()) ? shape[dim] : 0;
    }
  }
  TORCH_SM3_CHECK_VALUE(
      count == shape.size(),
      "SM3",
      "cover",
      c10::str("the dimensions of shape ", shape, " in merge"),
      c10::str(count, " dimensions"));
  return standard_cover(std::move(view));
}

// A piece of `dim` by itself: its axis belongs to every group.
ResolvedCover split_cover(const Cover& cover, at::IntArrayRef shape) {
  const int64_t dim = dim_of(cover.numbers()[0][0], shape.size());
  const int64_t number = cover.numbers()[0][1];
  TORCH_SM3_CHECK_VALUE(
      shape[dim] % number == 0,
      "SM3",
      "cover",
      c10::str(cover.kind(), " that divide dimension ", dim, " of ", shape),
      number);
  const int64_t other = shape[dim] / number;
  ResolvedCover split{shape.vec(), {}};
  split.view[dim] = cover.kind() == "heads" ? other : number;
  split.view.insert(
      split.view.begin() + dim, cover.kind() == "heads" ? number : other);
  for (const int64_t axis : all_axes(split.view.size())) {
    if (axis != dim) {
      split.axes.push_back({std::min(axis, dim), std::max(axis, dim)});
    }
  }
  return without_ones(split);
}

ResolvedCover view_cover(const Cover& cover, at::IntArrayRef shape) {
  ResolvedCover made{cover.numbers()[0], {}};
  const int64_t numel = c10::multiply_integers(shape);
  const auto free = std::find(made.view.begin(), made.view.end(), -1);
  if (free != made.view.end()) {
    *free = 1;
    const int64_t rest = c10::multiply_integers(made.view);
    *free = rest == 0 ? 0 : numel / rest;
  }
  TORCH_SM3_CHECK_VALUE(
      c10::multiply_integers(made.view) == numel,
      "SM3",
      "cover",
      c10::str("a view of the ", numel, " elements of a parameter of ", shape),
      at::IntArrayRef(cover.numbers()[0]));
  const Cover::Axes groups{cover.numbers().begin() + 1, cover.numbers().end()};
  made.axes = groups.empty() ? single_axes(made.view.size())
                             : groups_of(groups, made.view.size());
  return made;
}

ResolvedCover made_for(const Cover& cover, at::IntArrayRef shape, bool named) {
  const std::string& kind = cover.kind();
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  if (empty || kind == "diagonal") {
    return diagonal_cover(shape);
  }
  if (kind == "standard" || (kind == "auto" && named)) {
    return standard_cover(shape.vec());
  }
  if (kind == "auto") {
    return auto_cover(shape);
  }
  if (kind == "merge") {
    return merge_cover(cover, shape);
  }
  if (kind == "axes") {
    return {shape.vec(), groups_of(cover.numbers(), shape.size())};
  }
  return kind == "view" ? view_cover(cover, shape) : split_cover(cover, shape);
}

} // namespace

void ResolvedCover::encode(std::vector<int64_t>& numbers) const {
  numbers.push_back(static_cast<int64_t>(view.size()));
  numbers.insert(numbers.end(), view.begin(), view.end());
  numbers.push_back(static_cast<int64_t>(axes.size()));
  for (const auto& group : axes) {
    int64_t mask = 0;
    for (const int64_t axis : group) {
      mask |= int64_t{1} << axis;
    }
    numbers.push_back(mask);
  }
}

ResolvedCover
resolve_cover(const Cover& cover, at::IntArrayRef shape, bool named) {
  ResolvedCover made = made_for(cover, shape, named);
  TORCH_SM3_CHECK_VALUE(
      static_cast<int64_t>(made.view.size()) <= kMaxAxes,
      "SM3",
      "cover",
      c10::str("at most ", kMaxAxes, " axes"),
      made.view.size());
  return made;
}

} // namespace torch_sm3::optim
