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
std::vector<int64_t> group_of(const std::vector<int64_t>& axes, size_t rank) {
  std::vector<int64_t> group;
  group.reserve(axes.size());
  for (const int64_t axis : axes) {
    group.push_back(dim_of(axis, rank));
  }
  std::sort(group.begin(), group.end());
  TORCH_SM3_CHECK_VALUE(
      std::adjacent_find(group.begin(), group.end()) == group.end(),
      "SM3",
      "cover",
      "distinct axes in a group",
      at::IntArrayRef(axes));
  return group;
}

Cover::Axes groups_of(const Cover::Axes& axes, size_t rank) {
  Cover::Axes groups;
  for (const auto& group : axes) {
    groups.push_back(group_of(group, rank));
  }
  TORCH_SM3_CHECK_VALUE(
      !groups.empty(), "SM3", "cover", "at least one group of axes", "none");
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
  return groups;
}

// The number of a size-1 axis is never the least one: the axis goes, and with
// it a group that holds nothing else, unless it is the only one.
ResolvedCover without_ones(const ResolvedCover& cover) {
  ResolvedCover kept;
  std::vector<int64_t> place(cover.view.size(), -1);
  for (size_t axis = 0; axis < cover.view.size(); ++axis) {
    if (cover.view[axis] != 1) {
      place[axis] = static_cast<int64_t>(kept.view.size());
      kept.view.push_back(cover.view[axis]);
    }
  }
  for (const auto& axes : cover.axes) {
    std::vector<int64_t> group;
    for (const int64_t axis : axes) {
      if (place[axis] >= 0) {
        group.push_back(place[axis]);
      }
    }
    if (!group.empty()) {
      kept.axes.push_back(std::move(group));
    }
  }
  if (kept.axes.empty()) {
    kept.axes.push_back({});
  }
  return kept;
}

ResolvedCover named_cover(const std::string& kind, at::IntArrayRef shape) {
  const ResolvedCover whole{shape.vec(), single_axes(shape.size())};
  ResolvedCover cover = without_ones(whole);
  const int64_t sum =
      std::accumulate(cover.view.begin(), cover.view.end(), int64_t{0});
  const int64_t product = c10::multiply_integers(cover.view);
  if (product == 0 || kind == "diagonal" ||
      (kind == "auto" && sum >= product)) {
    cover.axes = {all_axes(cover.view.size())};
  }
  return cover;
}

// A piece of `dim` by itself: its axis belongs to every group.
ResolvedCover split_cover(const Cover& cover, at::IntArrayRef shape) {
  const int64_t dim = dim_of(cover.numbers()[0][0], shape.size());
  const int64_t number = cover.numbers()[0][1];
  TORCH_SM3_CHECK_VALUE(
      number > 0 && shape[dim] % number == 0,
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
  return split;
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
  const bool fits = std::all_of(
                        made.view.begin(),
                        made.view.end(),
                        [](int64_t n) { return n >= 0; }) &&
                    c10::multiply_integers(made.view) == numel;
  TORCH_SM3_CHECK_VALUE(
      fits,
      "SM3",
      "cover",
      c10::str("a view of the ", numel, " elements of a parameter of ", shape),
      at::IntArrayRef(cover.numbers()[0]));
  const Cover::Axes groups{cover.numbers().begin() + 1, cover.numbers().end()};
  made.axes = groups.empty() ? single_axes(made.view.size())
                             : groups_of(groups, made.view.size());
  return made;
}

} // namespace

Cover::Cover(std::string kind, Axes numbers)
    : kind_(std::move(kind)), numbers_(std::move(numbers)) {}

Cover::Cover(const char* name) : Cover(std::string(name)) {}

Cover::Cover(const std::string& name) : kind_(name) {
  TORCH_SM3_CHECK_VALUE(
      name == "auto" || name == "standard" || name == "diagonal",
      "SM3",
      "cover",
      "\"auto\", \"standard\", \"diagonal\" or a Cover",
      c10::str("\"", name, "\""));
}

Cover Cover::standard() {
  return {"standard"};
}

Cover Cover::diagonal() {
  return {"diagonal"};
}

Cover Cover::merge(Axes groups) {
  return restore("merge", std::move(groups));
}

Cover Cover::heads(int64_t dim, int64_t n) {
  return restore("heads", {{dim, n}});
}

Cover Cover::blocks(int64_t dim, int64_t size) {
  return restore("blocks", {{dim, size}});
}

Cover Cover::view(std::vector<int64_t> sizes, Axes groups) {
  groups.insert(groups.begin(), std::move(sizes));
  return restore("view", std::move(groups));
}

Cover Cover::restore(const std::string& kind, Axes numbers) {
  if (kind == "heads" || kind == "blocks") {
    TORCH_SM3_CHECK_VALUE(
        numbers.size() == 1 && numbers[0].size() == 2,
        "SM3",
        "cover",
        c10::str("a dimension and a number for ", kind),
        c10::str(numbers.size(), " lists"));
  } else if (kind == "merge" || kind == "view") {
    TORCH_SM3_CHECK_VALUE(
        !numbers.empty(),
        "SM3",
        "cover",
        c10::str("at least one list for ", kind),
        "none");
    const auto free = [](const auto& sizes) {
      return std::count(sizes.begin(), sizes.end(), -1);
    };
    TORCH_SM3_CHECK_VALUE(
        kind == "merge" || free(numbers[0]) <= 1,
        "SM3",
        "cover",
        "at most one -1 in a view",
        at::IntArrayRef(numbers[0]));
  } else {
    TORCH_SM3_CHECK_VALUE(
        numbers.empty(),
        "SM3",
        "cover",
        c10::str("no list for \"", kind, "\""),
        c10::str(numbers.size(), " lists"));
    return {kind};
  }
  return {kind, std::move(numbers)};
}

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
  const std::string& kind = cover.kind();
  ResolvedCover made;
  if (kind == "heads" || kind == "blocks") {
    made = without_ones(split_cover(cover, shape));
  } else if (kind == "merge") {
    made =
        without_ones({shape.vec(), groups_of(cover.numbers(), shape.size())});
  } else if (kind == "view") {
    made = view_cover(cover, shape);
  } else {
    made = named_cover(kind == "auto" && named ? "standard" : kind, shape);
  }
  TORCH_SM3_CHECK_VALUE(
      static_cast<int64_t>(made.view.size()) <= kMaxAxes,
      "SM3",
      "cover",
      c10::str("at most ", kMaxAxes, " axes"),
      made.view.size());
  return made;
}

} // namespace torch_sm3::optim
